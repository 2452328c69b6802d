"""How much each of several teachers counts at a token: by given weights, or by how sure it is there.

| weighting  | share of teacher n at a token, in proportion to                                     |
|------------|-------------------------------------------------------------------------------------|
| `static`   | its weight                                                                          |
| `ce`       | weight * exp(alpha * log-prob that it gave to the text)                             |
| `entropy`  | weight * exp(-alpha * entropy of its next token)                                    |
| `max_prob` | weight * exp(alpha * probability of its likeliest token)                            |
| `select`   | all for the teacher that gave the text the highest log-prob, the first among equals |

Scores are X-Token's (arXiv 2605.21699), but of a token instead of a batch, so that no share depends on how a batch is
cut. Only teachers that speak of a token share it; ``static`` shares alone are as given, as are all where no teacher
speaks, and what a silent teacher would have had goes to the text.

Shapes: N positions, M teachers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitstore.consumer.teacher_batches import TeacherBatch
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.errors import ConfigError


def require_scores(teachers: tuple[TeacherColumns, ...], weighting: str) -> None:
    """Refuse a weighting whose scores are not stored, before anything is read.

    Raises:
        ConfigError: ``entropy`` without a teacher's scalars.
    """
    for teacher in teachers:
        if weighting == "entropy" and teacher.scalars is None:
            raise ConfigError(
                f"--teacher-weighting entropy: teacher {teacher.name!r} has no scalars on every block; produce with "
                "--signals scalars,sparse, or weigh by ce or max_prob"
            )


def teacher_shares(
    teachers: tuple[TeacherBatch, ...], weights: list[float], weighting: str, alpha: float
) -> list[Tensor]:
    """Share of each teacher at each token, M times [N].

    Args:
        teachers: M words on a batch.
        weights: M, which sum to one.
        weighting: one of ``objectives.TEACHER_WEIGHTINGS``.
        alpha: how much scores count, >= 0; 0 leaves the weights.
    """
    static_NM = torch.tensor(weights, device=teachers[0].has_row.device).expand(len(teachers[0].has_row), -1)
    if weighting == "static":
        return list(static_NM.unbind(-1))
    speaks_NM = torch.stack([teacher.has_row for teacher in teachers], -1)
    scores_NM = torch.stack([_score(teacher, weighting) for teacher in teachers], -1)
    scores_NM = scores_NM.masked_fill(~speaks_NM, -torch.inf)
    if weighting == "select":
        shares_NM = torch.nn.functional.one_hot(scores_NM.argmax(-1), len(teachers)).float()
    else:
        shares_NM = (static_NM.log() + alpha * scores_NM).masked_fill(~speaks_NM, -torch.inf).softmax(-1)
    return list(torch.where(speaks_NM.any(-1, keepdim=True), shares_NM, static_NM).unbind(-1))


def _score(teacher: TeacherBatch, weighting: str) -> Tensor:
    """[N], finite wherever the teacher has a row; higher counts more."""
    if weighting == "max_prob":
        return teacher.top_logprob.exp()
    if weighting == "entropy":
        assert teacher.entropy is not None, "see require_scores"
        return -teacher.entropy
    # What it gave to the whole of the student's token where that is known, else to what begins with it; not from the
    # row if there is another way, for that is at the temperature of the objective.
    spans = teacher.spans
    first_N = torch.where(spans.first.isfinite(), spans.first, teacher.rows.log_masses_NK[:, 0])
    return torch.where(spans.is_single, first_N + spans.continuation, first_N)
