"""A student's head on the charged positions of a batch: what objectives ask of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitstore.consumer.primitive import HeadOutputs, head_outputs
from logitstore.consumer.student import Student


class StudentHead:
    """``head_outputs`` of one student at N positions, always with the realised tokens' logits.

    Attributes:
        hidden_ND: hidden states that predict the targets.
        targets_N: int64, the realised tokens.
    """

    def __init__(self, student: Student, hidden_ND: Tensor, targets_N: Tensor) -> None:
        self.hidden_ND, self.targets_N = hidden_ND, targets_N
        self._student = student
        self._logprobs_N: Tensor | None = None

    def __call__(self, ids_NK: Tensor | None = None, *, temperature: float = 1.0, **options: Any) -> HeadOutputs:
        """What the head says of some ids, or of none but the targets; see ``head_outputs`` for the options."""
        if ids_NK is None:
            ids_NK = self.targets_N.new_full((len(self.targets_N), 1), -1)
        outputs = head_outputs(
            self.hidden_ND,
            self._student.head,
            ids_NK,
            realised_T=self.targets_N,
            bias=self._student.head_bias,
            softcap=self._student.transform.softcap,
            scale=self._student.transform.scale,
            temperature=temperature,
            **options,
        )
        if temperature == 1.0:
            assert outputs.realised_T is not None
            self._logprobs_N = outputs.realised_T - outputs.logsumexp_T
        return outputs

    def logprobs(self) -> Tensor:
        """[N] log-probs of the targets, nats; those of the last call at temperature 1, if there was one."""
        if self._logprobs_N is None:
            self()
        assert self._logprobs_N is not None
        return self._logprobs_N
