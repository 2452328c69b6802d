"""Several teachers at a token: shares against plain loops, mixed tokenizers in one run, and what is recorded."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cross_store import CrossStore
from dense_terms import Word, dense_loss, words
from small_store import Silent
from terminal import run_here
from test_batch_loss import assert_gradients_close, gradients
from test_terms import measured

from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.batches import Batch
from logitstore.consumer.objectives import TEACHER_WEIGHTINGS, Objective
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.teacher_weighting import teacher_shares
from logitstore.consumer.trainer import Trainer, TrainerConfig
from logitstore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("settings_of_torch")

WEIGHTS = {"a": 0.7, "b": 0.3}


def score(word: Word, weighting: str) -> float:
    if weighting == "entropy":
        return -float(word.entropy)
    if weighting == "max_prob":
        return float(word.top)
    if not word.span:  # one that is cut by the end of a piece: only the row tells
        return math.log(word.entries[0][1])
    return sum(word.pieces) if len(word.span) == 1 else word.pieces[0]


def shares_of(weighting: str, alpha: float) -> Callable[[list[list[Word]], int], list[float]]:
    """Of each teacher at a token, by the table of the documentation."""
    weights = list(WEIGHTS.values())

    def shares(said: list[list[Word]], n: int) -> list[float]:
        speaking = [m for m, each in enumerate(said) if each[n].entries]
        if weighting == "static" or not speaking:
            return weights
        scores = {m: score(said[m][n], weighting) for m in speaking}
        if weighting == "select":
            best = max(speaking, key=lambda m: (scores[m], -m))
            return [float(m == best) for m in range(len(said))]
        factors = {m: weights[m] * math.exp(alpha * scores[m]) for m in speaking}
        return [factors.get(m, 0.0) / sum(factors.values()) for m in range(len(said))]

    return shares


def first_batch(cross: CrossStore, tokenizer: str, temperature: float = 1.0) -> tuple[Stream, list[PlacedBin], Batch]:
    stream = cross.stream(tokenizer, temperature=temperature, teacher_weights=WEIGHTS)
    bins = next(iter(stream))
    return stream, bins, stream.collate(bins)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("tokenizer", ["a", "rough"])
@pytest.mark.parametrize("weighting", TEACHER_WEIGHTINGS)
def test_shares_agree_with_a_plain_loop(cross: CrossStore, tokenizer: str, weighting: str, temperature: float) -> None:
    """With a teacher of the student's tokens and one of others, and with two of others."""
    stream, bins, batch = first_batch(cross, tokenizer, temperature)
    found = teacher_shares(batch.teachers, [0.7, 0.3], weighting, 1.5)
    said = [words(cross.store, stream, bins, number, temperature) for number in range(2)]
    seen = set()
    for n in range(batch.num_charged):
        expected = shares_of(weighting, 1.5)(said, n)
        assert [share[n].item() for share in found] == pytest.approx(expected, abs=1e-5)
        seen.add(tuple(bool(each[n].entries) for each in said))
    assert (True, True) in seen
    assert seen - {(True, True)}  # somebody is silent somewhere


@pytest.mark.parametrize("weighting", ["ce", "entropy", "max_prob"])
def test_alpha_of_zero_leaves_the_weights_among_those_that_speak(cross: CrossStore, weighting: str) -> None:
    _, _, batch = first_batch(cross, "a")
    a, b = teacher_shares(batch.teachers, [0.7, 0.3], weighting, 0.0)
    speaks_a, speaks_b = (teacher.has_row for teacher in batch.teachers)
    assert (speaks_a & ~speaks_b).any()
    assert torch.allclose(a[speaks_a & speaks_b], torch.tensor(0.7))
    assert (a[speaks_a & ~speaks_b] == 1.0).all()
    assert (b[speaks_a & ~speaks_b] == 0.0).all()


def test_large_alpha_tends_to_the_best(cross: CrossStore) -> None:
    _, _, batch = first_batch(cross, "rough")
    sharp, best = (teacher_shares(batch.teachers, [0.7, 0.3], *each) for each in (("ce", 1e4), ("select", 1.0)))
    for one, other in zip(sharp, best, strict=True):
        assert (one - other).abs().median() == 0
        assert one.isfinite().all()


@pytest.mark.parametrize("weighting", TEACHER_WEIGHTINGS)
def test_equals_share_by_weight_and_the_first_of_them_is_selected(cross: CrossStore, weighting: str) -> None:
    _, _, batch = first_batch(cross, "a")
    twins = (batch.teachers[0], batch.teachers[0])
    a, b = teacher_shares(twins, [0.25, 0.75], weighting, 2.0)
    expected = (1.0, 0.0) if weighting == "select" else (0.25, 0.75)
    assert torch.allclose(a, torch.tensor(expected[0]))
    assert torch.allclose(b, torch.tensor(expected[1]))


@pytest.mark.parametrize("weighting", TEACHER_WEIGHTINGS)
def test_shares_of_every_token_sum_to_one(cross: CrossStore, weighting: str) -> None:
    _, _, batch = first_batch(cross, "rough")
    none = torch.zeros(batch.num_charged, dtype=torch.bool)
    silent = tuple(replace(teacher, has_row=none) for teacher in batch.teachers)
    for teachers in (batch.teachers, silent, (batch.teachers[0], silent[1])):
        total = sum(teacher_shares(teachers, [0.7, 0.3], weighting, 1.0))
        assert torch.allclose(total, torch.ones(batch.num_charged))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weighting", TEACHER_WEIGHTINGS)
def test_a_run_on_teachers_of_mixed_tokenizers_agrees_with_plain_loops(
    cross: CrossStore, tmp_path: Path, weighting: str, temperature: float
) -> None:
    """``first_byte_kl`` is the KL over tokens for the teacher that has the student's."""
    student, (stream, bins, batch) = cross.student(tmp_path, "a"), first_batch(cross, "a", temperature)
    assert [teacher.maps is None for teacher in stream.data.teachers] == [True, False]
    objective = Objective({"first_byte_kl": 0.8, "ce": 0.2}, teacher_weighting=weighting, teacher_alpha=0.5)
    found = measured(student, stream, batch, objective, temperature)
    reference = copy.deepcopy(student.model).double()
    reference.zero_grad()
    said = [words(cross.store, stream, bins, number, temperature) for number in range(2)]
    shares = shares_of(weighting, 0.5)
    expected = dense_loss(cross.store, reference, student.tokenizer, stream, bins, objective, temperature, shares)
    expected.total.backward()
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert_gradients_close(gradients(student.model), gradients(reference), 3e-4)
    terms = dict(expected.terms)
    if weighting != "static":
        sums = torch.tensor([shares(said, n) for n in range(batch.num_charged)]).sum(0).tolist()
        terms |= {"share/a": sums[0], "share/b": sums[1]}
    assert {name: value.item() for name, value in found.terms.items()} == pytest.approx(terms, rel=1e-5)


@pytest.mark.parametrize("term", ["chunk_likelihood", "gold", "xtoken_hkl"])
def test_shares_of_tokens_are_refused_for_spans_that_differ(cross: CrossStore, tmp_path: Path, term: str) -> None:
    student, (stream, *_) = cross.student(tmp_path, "a"), first_batch(cross, "a")
    with pytest.raises(ConfigError, match=f"{term} charges a span .* use static"):
        BatchLoss(Objective({term: 1.0}, teacher_weighting="ce"), stream.data.teachers, 1.0, student)


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(ConfigError, match="'selcet': expected one of static"):
        Objective({"kl": 1.0}, teacher_weighting="selcet")


def test_metrics_of_each_teacher_are_means_over_charged_tokens(cross: CrossStore, tmp_path: Path) -> None:
    objective = Objective({"kl": 0.6, "first_byte_kl": 0.2, "ce": 0.2}, teacher_weighting="ce")
    student, (stream, _, batch) = cross.student(tmp_path, "a"), first_batch(cross, "a")
    with torch.no_grad():
        expected = BatchLoss(objective, stream.data.teachers, 1.0, student)(student, batch)
    config = TrainerConfig(max_steps=2, log_every=1, micro_batch_tokens=64)
    folder = tmp_path / "run"
    folder.mkdir()
    stream = cross.stream("a", teacher_weights=WEIGHTS)
    Trainer(student, stream, objective, config, folder, "cpu", Silent()).run()
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    names = {f"{term}/{name}" for term in ("kl", "first_byte_kl", "share") for name in "ab"} | {"ce"}
    assert expected.terms.keys() == names
    for name in names:
        assert record[name] == pytest.approx(expected.terms[name].item() / batch.num_charged, rel=1e-5)
    assert record["loss"] == pytest.approx(expected.total.item() / batch.num_charged, rel=1e-5)
    assert record["share/a"] + record["share/b"] == pytest.approx(1.0)


def test_train_weighs_teachers_of_mixed_tokenizers(
    cross: CrossStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cross.student(tmp_path, "a")
    ran = run_here(
        capsys,
        *("train", cross.url, "--dataset", "mixed", "--student-config", str(tmp_path / "student.json")),
        *("--student-tokenizer", cross.tokenizers["a"], "--output", str(tmp_path / "run"), "--max-steps", "2"),
        *("--seq-length", "64", "--batch-tokens", "192", "--objective", "kl:0.9,ce:0.1", "--threads", "1"),
        *("--teacher-weights", "b=1,a=3", "--teacher-weighting", "max_prob", "--teacher-alpha", "2"),
    )
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert record["share/a"] > record["share/b"] > 0
    assert record["kl/b"] > 0


def test_scores_that_are_not_stored_are_refused_before_training(cross: CrossStore, tmp_path: Path) -> None:
    student, stream = cross.student(tmp_path, "a"), cross.stream("a")
    bare = (stream.data.teachers[0], replace(stream.data.teachers[1], scalars=None))
    objective = Objective({"kl": 1.0}, teacher_weighting="entropy")
    with pytest.raises(ConfigError, match=r"entropy: teacher 'b' has no scalars .*or weigh by ce or max_prob"):
        BatchLoss(objective, bare, 1.0, student)
    BatchLoss(replace(objective, teacher_weighting="max_prob"), bare, 1.0, student)
