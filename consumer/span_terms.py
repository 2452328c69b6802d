"""Terms that compare spans of text, from one shared beginning to the next, or pair tokens by rank.

Shapes: N positions, K entries, C spans, V the student's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitstore.consumer.batches import Batch
from logitstore.consumer.cell_maps import SparseProjection
from logitstore.consumer.chunk_likelihood import chunk_likelihood, debiased, sum_by_chunk
from logitstore.consumer.gold import gold, gold_rows, uld
from logitstore.consumer.matching import TokenMatching
from logitstore.consumer.student_head import StudentHead
from logitstore.consumer.teacher_batches import SpanBatch, TeacherBatch
from logitstore.consumer.terms import Charge
from logitstore.consumer.xtoken import reachable_rows, xtoken_pkl


class ChunkLikelihood:
    """``chunk_likelihood``: the text from one shared beginning to the next, by its probability.

    The loss is multiplied by tau, which gives its gradient the size of cross-entropy's. A chunk's last token is charged
    with all of it, the others with nothing.
    """

    def __init__(self, tau: float, starts_1V: Tensor, *, debias: bool) -> None:
        """
        Args:
            tau: see ``chunk_likelihood``.
            starts_1V: bool, the student's tokens that start at a boundary.
            debias: whether the mass of a boundary after a chunk counts, on both sides, and chunks that the teacher
                would hardly end there are left to the text.
        """
        self.tau, self.starts_1V, self.debias = tau, starts_1V, debias

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        spans = teacher.spans
        outputs = head(subsets_GV=self.starts_1V) if self.debias else head()
        student_C = sum_by_chunk(head.logprobs(), spans.of_token, spans.num_spans)
        teacher_C, is_compared_C = spans.logprob, torch.ones_like(spans.last, dtype=torch.bool)
        if self.debias:
            assert outputs.subsets_TG is not None
            theirs_C, ours_C = self._boundaries(outputs.subsets_TG[:, 0] - outputs.logsumexp_T, spans, teacher)
            teacher_C, student_C, is_compared_C = teacher_C + theirs_C, student_C + ours_C, debiased(theirs_C)
        loss_C = self.tau * chunk_likelihood(teacher_C, student_C, self.tau)
        loss_N = torch.zeros_like(head.logprobs()).index_add(0, spans.last, loss_C)
        speaks_N = (spans.of_token >= 0) & torch.cat([is_compared_C, is_compared_C.new_zeros(1)])[spans.of_token]
        return Charge(loss_N, speaks_N, loss_N)

    def _boundaries(self, starts_N: Tensor, spans: SpanBatch, teacher: TeacherBatch) -> tuple[Tensor, Tensor]:
        """[C] log-mass of a boundary after each chunk, the teacher's and the student's; 0 where no token follows."""
        assert teacher.starts is not None, "checked by make_term"
        after_C = spans.following.clamp(min=0)
        is_known_C = (spans.following >= 0) & teacher.has_row[after_C]
        both = (starts.float()[after_C] for starts in (teacher.starts, starts_N))
        theirs_C, ours_C = (torch.where(is_known_C, starts_C, 0.0) for starts_C in both)
        return theirs_C, ours_C


class Uld:
    """``uld``: sorted probabilities, where the student's token and the teacher's begin together."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        outputs = head(num_top=teacher.rows.ids_NK.shape[1], temperature=self.temperature)
        distance_N = uld(teacher.rows, outputs)
        return Charge(distance_N, teacher.has_row, distance_N)


class Gold:
    """``gold``, and with looser pairs of tokens ``xtoken_hkl``: a span is charged where it begins, as one event."""

    def __init__(self, matching: TokenMatching, temperature: float) -> None:
        self.matching, self.temperature = matching, temperature

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        spans = teacher.spans
        begins_N, speaks_N = teacher.has_row & (spans.of_token >= 0), spans.of_token >= 0
        if self.temperature != 1.0:  # log-probs of what follows a first token are known at temperature 1
            begins_N = speaks_N = begins_N & spans.is_single & (spans.continuation == 0.0)
        cut = gold_rows(
            teacher.rows,
            self.matching,
            batch.targets.where(begins_N, -1),
            spans.continuation.masked_fill(~begins_N, 0.0),
        )
        outputs = head(
            cut.matched.ids_NK,
            num_top=cut.unmatched_NK.shape[1],
            top_among_V=self.matching.unmatched_V,
            temperature=self.temperature,
        )
        continuation_N = None
        if self.temperature == 1.0:
            followers_C = sum_by_chunk(head.logprobs().masked_fill(begins_N, 0.0), spans.of_token, spans.num_spans)
            of_span_N = torch.cat([followers_C, followers_C.new_zeros(1)])[spans.of_token]
            continuation_N = of_span_N.masked_fill(~begins_N, 0.0)
        loss_N = gold(cut, outputs, continuation_N, temperature=self.temperature)
        loss_N = torch.where(begins_N, loss_N, 0.0)
        return Charge(loss_N, speaks_N, loss_N)


class ProjectedStudentKl:
    """``xtoken_pkl``: KL in the teacher's vocabulary, where the student's token and the teacher's begin together."""

    def __init__(self, projection: SparseProjection, temperature: float) -> None:
        self.projection, self.reachable_U = projection, projection.reachable()
        self.temperature = temperature

    def __call__(self, head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
        rows = reachable_rows(teacher.rows, self.reachable_U)
        outputs = head(rows.ids_NK, projection=self.projection, temperature=self.temperature)
        kl_N = xtoken_pkl(rows, outputs, self.temperature)
        return Charge(kl_N, teacher.has_row, kl_N)
