"""Held-out measures of a student, against the text and against each teacher.

Shapes: N charged tokens, R of them at a time, K entries, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.objectives import Objective
from logitstore.consumer.projection import class_of, student_groups
from logitstore.consumer.stream import Stream
from logitstore.consumer.student import Student
from logitstore.consumer.teacher_batches import TeacherBatch
from logitstore.consumer.teacher_columns import TeacherColumns

_CHUNK_LOGITS = 1 << 23


@dataclass
class _Sums:
    """Over the held-out tokens that a teacher has a row for, in nats."""

    cross_entropy: float = 0.0
    kl: float = 0.0
    teacher_nats: float = 0.0
    num_spoken: int = 0
    agreements: float = 0.0
    num_rows: int = 0


@torch.no_grad()
def evaluate(student: Student, stream: Stream, device: str, batch_sequences: int | None = None) -> dict[str, float]:
    """Measure a student on the held-out blocks of a stream's dataset.

    Args:
        student: on ``device``.
        stream: of its training; where it stands is left as it is.
        device: to compute on.
        batch_sequences: sequences of one forward pass; as in training by default.

    Returns:
        ``cross_entropy`` (nats a token) and ``bits_per_byte``; for each teacher, over the tokens that it has a row for,
        ``kl/NAME`` (nats a token, at temperature 1: forward KL on the stored partition, or the unbiased cross-entropy
        less the teacher's own entropy) or, where the entropy is not known, ``teacher_cross_entropy/NAME``; and
        ``top1_agreement/NAME``, the share of tokens whose likeliest token, or its class, is the teacher's. With a row
        and a log-prob for every token, ``teacher_bits_per_byte/NAME``. Empty if nothing is held out.
    """
    student.model.eval()
    measure = BatchLoss(Objective({"kl": 1.0, "ce": 1.0}), stream.data.teachers, 1.0, student)
    sums = {teacher.name: _Sums() for teacher in stream.data.teachers}
    cross_entropy, num_tokens, num_bytes = 0.0, 0, 0
    for bins in stream.held_out(batch_sequences):
        batch = stream.collate(bins, temperature=1.0).to(device)
        hidden_ND = student.hidden(batch)
        measured = measure.of_hidden(student, hidden_ND, batch)
        cross_entropy += measured.terms["ce"].item()
        num_tokens += batch.num_charged
        num_bytes += batch.num_bytes
        likeliest_N = _likeliest(student, hidden_ND)
        for columns, teacher in zip(stream.data.teachers, batch.teachers, strict=True):
            sums[columns.name].num_spoken += int(measured.num_spoken[f"kl/{columns.name}"])
            _add(
                sums[columns.name],
                columns,
                teacher,
                measured.terms[f"kl/{columns.name}"].item(),
                likeliest_N,
                student.head.shape[0],
            )
    student.model.train()
    if num_tokens == 0:
        return {}
    values = {"cross_entropy": cross_entropy / num_tokens}
    if num_bytes > 0:  # of a document such as "x" without BOS only EOS is predicted
        values["bits_per_byte"] = cross_entropy / math.log(2) / num_bytes
    for name, found in sums.items():
        values |= _teacher_values(name, found, num_tokens, num_bytes)
    return values


def _add(
    sums: _Sums, columns: TeacherColumns, teacher: TeacherBatch, kl: float, likeliest_N: Tensor, head_rows: int
) -> None:
    has_row = teacher.has_row
    num_rows = int(has_row.sum())
    sums.num_rows += num_rows
    if not teacher.rows.is_sample:
        sums.kl += kl
    elif teacher.entropy is not None and columns.maps is None:
        sums.kl += kl - teacher.entropy[has_row].sum().item()
    else:
        sums.cross_entropy += kl
    theirs_N = teacher.likeliest
    if columns.maps is None:
        # Each token is a span, and what the teacher gave to it is the span's log-prob.
        sums.teacher_nats -= teacher.spans.logprob.sum().item()
    else:
        groups, _ = student_groups(columns.maps.classes, head_rows)
        likeliest_N = groups.to(likeliest_N.device)[likeliest_N]
        if columns.scalars is not None or not columns.is_projected:
            theirs_N = class_of(theirs_N, torch.tensor(columns.maps.classes.teacher_class).to(theirs_N.device))
    sums.agreements += (theirs_N == likeliest_N)[has_row].sum().item()


def _teacher_values(name: str, sums: _Sums, num_tokens: int, num_bytes: int) -> dict[str, float]:
    if sums.num_rows == 0:
        return {}
    rows, spoken = sums.num_rows, max(1, sums.num_spoken)
    values = {f"top1_agreement/{name}": sums.agreements / rows}
    if sums.cross_entropy:
        values[f"teacher_cross_entropy/{name}"] = sums.cross_entropy / spoken
    else:
        values[f"kl/{name}"] = sums.kl / spoken
    if sums.teacher_nats and rows == num_tokens and num_bytes > 0:
        values[f"teacher_bits_per_byte/{name}"] = sums.teacher_nats / math.log(2) / num_bytes
    return values


def _likeliest(student: Student, hidden_ND: Tensor) -> Tensor:
    """int64 [N]: the student's most likely token. Softcaps and positive scales do not change it."""
    chunk = max(1, _CHUNK_LOGITS // student.head.shape[0])
    bias = 0.0 if student.head_bias is None else student.head_bias
    return torch.cat([(rows @ student.head.T + bias).argmax(-1) for rows in hidden_ND.split(chunk)])
