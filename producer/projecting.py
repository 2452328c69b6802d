"""A teacher's whole distribution pushed forward to the classes that it shares with a student's tokenizer.

Done before anything is selected, a stored row is exact for these classes: an entry is the mass of a whole class, where
entries of tokens, mapped later, hold of each class only the tokens that were kept. Tokens without a class, and what the
head has beyond the vocabulary, make one class of their own, after all others.

Shapes: R rows of a chunk, V rows of the head, C classes and one more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from logitstore.producer.policy import Policy, Rows
from logitstore.vocabulary_maps import VocabularyMaps


@dataclass(frozen=True)
class Projection:
    """Classes that rows are pushed forward to."""

    maps: str
    """Digest of the vocabulary maps whose classes they are."""
    class_V: Tensor
    """int64, class of each row of the teacher's head."""
    num_classes: int
    """C + 1."""

    @classmethod
    def of(cls, maps: VocabularyMaps, vocabulary_size: int) -> Projection:
        """The classes of ``maps`` for a head of V = ``vocabulary_size`` rows."""
        unclassed = maps.classes.num_classes
        class_of = np.full(vocabulary_size, unclassed, np.int64)
        known = maps.classes.teacher_class
        class_of[: len(known)] = np.where(known < 0, unclassed, known)
        return cls(maps.digest, torch.from_numpy(class_of), unclassed + 1)

    def to(self, device: torch.device) -> Projection:
        return replace(self, class_V=self.class_V.to(device))

    def push_forward(self, rows: Rows) -> Rows:
        """Rows over classes: masses are sums of float32 probabilities, logits their logs, so that log Z is 0."""
        class_V = self.class_V
        probs_RC = sum_by_class(rows.probs_RV, class_V, self.num_classes)
        logits_RC = probs_RC.log()
        given_RK = rows.given_RK
        if given_RK is not None:
            given_RK = torch.where(given_RK >= 0, class_V[given_RK.clamp(min=0)], given_RK)
        return Rows(logits_RC, probs_RC, logits_RC.max(-1)[1], class_V[rows.realised_R], rows.words_R, given_RK)


@dataclass(frozen=True)
class Projected:
    """A signal on classes: which they are, and what chooses among them as it would among tokens."""

    projection: Projection
    policy: Policy


def sum_by_class(probs_RV: Tensor, class_V: Tensor, num_classes: int) -> Tensor:
    """float32 [R, C]: the sums of the columns of each class."""
    sums_RC = probs_RV.new_zeros(len(probs_RV), num_classes)
    if probs_RV.device.type == "cpu":  # several times faster there
        return sums_RC.scatter_add_(1, class_V.expand(probs_RV.shape), probs_RV)
    return sums_RC.index_add_(1, class_V, probs_RV)  # the one of the two that can be deterministic on a GPU
