"""Students of signals that were projected to their vocabulary when they were made: ``sparse@TOKENIZER``."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cross_store import STEP_NATS, CrossStore
from terminal import Ran, run_here
from test_batch_loss import gradients
from test_terms import measured

from logitstore.consumer.batches import Batch
from logitstore.consumer.data import TrainingData
from logitstore.consumer.objectives import Objective
from logitstore.consumer.stream import Stream
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("settings_of_torch")


def batches(cross: CrossStore) -> tuple[tuple[Stream, Batch], tuple[Stream, Batch]]:
    """The same tokens with the projected signal, and with the one over the teacher's whole vocabulary."""
    streams = [cross.stream("rough", dataset="whole", projected=projected) for projected in (True, False)]
    first, second = ((stream, stream.collate(next(iter(stream)))) for stream in streams)
    assert torch.equal(first[1].targets, second[1].targets)
    return first, second


def masses(batch: Batch, n: int) -> dict[int, float]:
    rows = batch.teachers[0].rows
    listed = zip(rows.ids_NK[n].tolist(), rows.log_masses_NK[n].exp().tolist(), strict=True)
    return {entry: mass for entry, mass in listed if entry >= 0}


def test_rows_are_the_whole_distribution_pushed_forward(cross: CrossStore) -> None:
    (stream, projected), (_, whole) = batches(cross)
    maps = stream.data.teachers[0].maps
    assert maps is not None
    of_token, num_compared = maps.classes.teacher_class.tolist(), 0
    for n in range(0, projected.num_charged, 3):
        assert bool(projected.teachers[0].has_row[n]) == bool(whole.teachers[0].has_row[n])
        if not whole.teachers[0].has_row[n]:
            continue
        entries = masses(whole, n)
        assert len(entries) > 340  # nothing is left out of these
        expected: dict[int, float] = {}
        for token, mass in entries.items():
            if token < len(of_token) and of_token[token] >= 0:  # else padding of the head, or a lonely special token
                expected[of_token[token]] = expected.get(of_token[token], 0.0) + mass
        found = {each: mass for each, mass in masses(projected, n).items() if mass > 0}  # one has student tokens alone
        assert found.keys() == expected.keys()
        for each, mass in found.items():
            assert abs(math.log(mass / expected[each])) < 1.5 * STEP_NATS
        num_compared += len(found)
        first = int(whole.teachers[0].rows.ids_NK[n, 0])
        assert int(projected.teachers[0].rows.ids_NK[n, 0]) == of_token[first]
    assert num_compared > 1000


def test_spans_have_the_same_logprobs_from_scalars(cross: CrossStore) -> None:
    (_, projected), (_, whole) = batches(cross)
    found, expected = (batch.teachers[0].spans for batch in (projected, whole))
    assert torch.equal(found.of_token, expected.of_token)
    sizes = torch.bincount(expected.of_token[expected.of_token >= 0])
    assert (found.logprob - expected.logprob).abs().max() < 5 * STEP_NATS
    assert len(sizes.unique()) > 1


def without_open_tokens(batch: Batch) -> Batch:
    none = torch.zeros(batch.num_charged, dtype=torch.int64)
    return replace(batch, teachers=tuple(replace(teacher, num_written=none) for teacher in batch.teachers))


@pytest.mark.parametrize("term", ["projected_kl", "kl"])
def test_kl_is_that_of_the_whole_vocabulary_up_to_rounding(cross: CrossStore, tmp_path: Path, term: str) -> None:
    student = cross.student(tmp_path, "rough")
    found = []
    for stream, batch in batches(cross):
        batch = without_open_tokens(batch)  # classes do not tell which tokens might go on
        sums = measured(student, stream, batch, Objective({term: 1.0}), 1.0)
        gradient = torch.cat([each.flatten() for each in gradients(student.model).values()])
        found.append((sums.total.item(), sums.terms[f"{term}/a"].item(), int(sums.num_spoken[f"{term}/a"]), gradient))
    (total, kl, spoken, gradient), (*expected, expected_gradient) = found
    assert [total, kl] == pytest.approx(expected[:2], rel=3e-3)
    assert spoken == expected[2] > 0
    assert (gradient - expected_gradient).norm() < 0.02 * expected_gradient.norm()


def only_teacher(cross: CrossStore, tokenizer: str, **options: Any) -> TeacherColumns:
    (teacher,) = cross.stream(tokenizer, dataset="whole", **options).data.teachers
    return teacher


@pytest.mark.parametrize("selection", [None, "topk", "topk:400"])
def test_the_projected_signal_goes_first_unless_told_otherwise(cross: CrossStore, selection: str | None) -> None:
    assert only_teacher(cross, "rough", selection=selection).is_projected
    assert only_teacher(cross, "rough", selection=selection, projected=True).is_projected
    assert not only_teacher(cross, "rough", selection=selection, projected=False).is_projected


def test_the_projection_for_another_student_is_no_signal(cross: CrossStore) -> None:
    ours, theirs = (only_teacher(cross, name) for name in ("rough", "b"))
    assert ours.is_projected
    assert theirs.is_projected
    assert ours.sparse.id != theirs.sparse.id
    assert not only_teacher(cross, "a").is_projected  # it has the teacher's own tokens
    with pytest.raises(ConfigError, match="no such signal; it has: topk:400"):
        only_teacher(cross, "a", projected=True)


def train(cross: CrossStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Ran:
    cross.student(tmp_path, "rough")
    return run_here(
        capsys,
        *("train", cross.url, "--dataset", "whole", "--student-config", str(tmp_path / "student.json")),
        *("--student-tokenizer", cross.tokenizers["rough"], "--output", str(tmp_path / "run"), "--max-steps", "3"),
        *("--seq-length", "64", "--batch-tokens", "192", "--threads", "1", *options),
    )


@pytest.mark.parametrize(
    ("term", "is_projected"), [("kl", True), ("chunk_likelihood", True), ("xtoken_pkl", False), ("gold", False)]
)
def test_train_takes_the_signal_that_serves_the_objective(
    cross: CrossStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    term: str,
    is_projected: bool,
) -> None:
    opened, taken = TrainingData.open, []

    def watched(*arguments: Any, **options: Any) -> TrainingData:
        data = opened(*arguments, **options)
        taken.extend(teacher.is_projected for teacher in data.teachers)
        return data

    monkeypatch.setattr(TrainingData, "open", watched)
    ran = train(cross, tmp_path, capsys, "--objective", f"{term}:0.9,ce:0.1", "--lr", "0.01")
    assert ran.code == 0, ran.err
    assert taken == [is_projected]
    last, held_out = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert last[f"{term}/a"] > 0
    assert {"kl/a", "top1_agreement/a"} <= held_out.keys()


def test_temperatures_are_refused_for_the_projected_signal(
    cross: CrossStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = train(cross, tmp_path, capsys, "--objective", "kl", "--temperature", "2")
    assert "--temperature 2: teacher 'a' has its mass outside the rows stored for 1 only" in ran.refusal()
