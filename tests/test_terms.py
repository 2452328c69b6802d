"""Terms of the objective from end to end, on real stores, against plain loops in float64 (``dense_terms``)."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cross_store import CrossStore
from dense_terms import DenseLoss, dense_loss
from small_store import SEQUENCE_LENGTH, SmallStore, make_student, open_stream
from terminal import run_here
from test_batch_loss import assert_gradients_close, gradients
from torch import Tensor
from torch.nn.functional import pad

from logitstore.consumer.batch_loss import BatchLoss, LossSums
from logitstore.consumer.batches import Batch
from logitstore.consumer.objectives import OVER_TEACHER_TOKENS, Objective
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.student import Student
from logitstore.consumer.student_head import StudentHead
from logitstore.consumer.teacher_batches import TeacherBatch
from logitstore.consumer.terms import Charge, Term
from logitstore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("settings_of_torch")

TERMS = ["first_byte_kl", "chunk_likelihood", "gold", "uld", "xtoken_pkl", "xtoken_hkl"]
BIASED = "chunk_likelihood without boundaries"


def objective_of(term: str, **weights: float) -> Objective:
    name = "chunk_likelihood" if term == BIASED else term
    return Objective({name: 1.0, **weights}, tau=20.0, debias=term != BIASED)


def measured(student: Student, stream: Stream, batch: Batch, objective: Objective, temperature: float) -> LossSums:
    student.model.zero_grad()
    found = BatchLoss(objective, stream.data.teachers, temperature, student)(student, batch)
    found.total.backward()
    return found


def assert_agrees(
    world: SmallStore | CrossStore,
    student: Student,
    stream: Stream,
    bins: list[PlacedBin],
    objective: Objective,
    temperature: float,
) -> DenseLoss:
    found = measured(student, stream, stream.collate(bins), objective, temperature)
    reference = copy.deepcopy(student.model).double()
    reference.zero_grad()
    expected = dense_loss(world.store, reference, student.tokenizer, stream, bins, objective, temperature)
    expected.total.backward()
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert {name: term.item() for name, term in found.terms.items()} == pytest.approx(expected.terms, rel=1e-5)
    assert {name: int(number) for name, number in found.num_spoken.items()} == expected.num_spoken
    assert_gradients_close(gradients(student.model), gradients(reference), 3e-4)
    return expected


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("term", [*TERMS, BIASED])
def test_terms_agree_with_plain_loops_where_spans_have_several_tokens_on_either_side(
    cross: CrossStore, tmp_path: Path, term: str, temperature: float
) -> None:
    student = cross.student(tmp_path, "rough")
    stream = cross.stream("rough", temperature=temperature, teacher_weights={"a": 0.7, "b": 0.3})
    expected = assert_agrees(cross, student, stream, next(iter(stream)), objective_of(term, ce=0.25), temperature)
    assert {(1, 1), (1, 2), (2, 1)} <= expected.span_sizes
    assert any(mine > 1 and theirs > 1 for mine, theirs in expected.span_sizes)
    name = next(iter(objective_of(term).terms))
    assert expected.num_spoken[f"{name}/a"] > 0


@pytest.mark.parametrize("term", [*TERMS, BIASED])
def test_terms_agree_with_plain_loops_on_chats_prompts_and_texts(small: SmallStore, tmp_path: Path, term: str) -> None:
    student, stream = make_student(small, tmp_path, "other"), open_stream(small, "other", sequences=2)
    bins = next(bins for bins in stream if max(len(pieces) for _, pieces in bins) > 1)  # something is packed
    assert_agrees(small, student, stream, bins, objective_of(term), 1.0)


@pytest.mark.parametrize("term", ["first_byte_kl", "chunk_likelihood", "xtoken_pkl"])
def test_terms_agree_with_plain_loops_on_sampled_rows(small: SmallStore, tmp_path: Path, term: str) -> None:
    student = make_student(small, tmp_path, "other")
    stream = open_stream(small, "other", selection="threshold", sequences=2)
    assert_agrees(small, student, stream, next(iter(stream)), objective_of(term), 1.0)


@pytest.mark.parametrize("term", ["chunk_likelihood", BIASED, "uld"])
def test_terms_agree_with_plain_loops_on_the_teachers_own_tokens(small: SmallStore, tmp_path: Path, term: str) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small, sequences=2)
    assert_agrees(small, student, stream, next(iter(stream)), objective_of(term), 1.0)


@pytest.mark.parametrize("term", ["projected_kl", *sorted(OVER_TEACHER_TOKENS - {"uld"})])
def test_terms_on_tokens_are_kl_for_a_teacher_of_the_same_tokens(small: SmallStore, tmp_path: Path, term: str) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    batch = stream.collate(next(iter(stream)))
    found, expected = (measured(student, stream, batch, objective_of(name), 1.0) for name in (term, "kl"))
    assert found.total.item() == expected.total.item()


@pytest.mark.parametrize("term", ["projected_kl", *TERMS, BIASED])
def test_terms_of_a_batch_are_the_sums_of_its_slices(cross: CrossStore, tmp_path: Path, term: str) -> None:
    """However narrow: what a token costs must not depend on its neighbours."""
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough")
    bins, objective = next(iter(stream)), objective_of(term, ce=0.1)
    whole = measured(student, stream, stream.collate(bins), objective, 1.0)
    expected = gradients(student.model)
    loss, total = BatchLoss(objective, stream.data.teachers, 1.0, student), 0.0
    student.model.zero_grad()
    pieces = [(block, (piece,)) for block, pieces in bins for piece in pieces]
    assert len(pieces) > 1
    for each in pieces:
        found = loss(student, stream.collate([each]))
        found.total.backward()
        total += found.total.item()
    assert total == pytest.approx(whole.total.item(), rel=1e-5)
    assert_gradients_close(gradients(student.model), expected)


@pytest.mark.parametrize("term", ["projected_kl", *TERMS])
def test_padding_contributes_nothing(cross: CrossStore, tmp_path: Path, term: str) -> None:
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough")
    bins = next(iter(stream))
    wide = replace(stream.config, sequence_length=2 * SEQUENCE_LENGTH, batch_tokens=6 * SEQUENCE_LENGTH)
    batch = Stream(stream.data, wide, 1.0).collate(bins)
    padded = batch.input_ids.clone()
    padded[:, SEQUENCE_LENGTH:] = torch.randint(4, 300, padded[:, SEQUENCE_LENGTH:].shape)
    batches = (stream.collate(bins), replace(batch, input_ids=padded))
    first, second = (measured(student, stream, each, objective_of(term), 1.0) for each in batches)
    assert first.total.item() == pytest.approx(second.total.item(), rel=1e-6)


@pytest.mark.parametrize("term", ["projected_kl", *TERMS])
def test_a_longer_row_elsewhere_in_the_batch_changes_nothing(cross: CrossStore, tmp_path: Path, term: str) -> None:
    """Rows of a batch are as wide as its longest: what stands in for missing entries must not be read."""
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough")
    student.head.data.mul_(5.0)  # sure enough to have tokens above what the teacher has not listed
    batch = stream.collate(next(iter(stream)))

    def widened(teacher: TeacherBatch) -> TeacherBatch:
        ids_NK = pad(teacher.rows.ids_NK, (0, 9), value=-1)
        masses_NK = pad(teacher.rows.log_masses_NK, (0, 9), value=-torch.inf)
        return replace(teacher, rows=replace(teacher.rows, ids_NK=ids_NK, log_masses_NK=masses_NK))

    wide = replace(batch, teachers=tuple(map(widened, batch.teachers)))
    found, expected = (measured(student, stream, each, objective_of(term), 1.0) for each in (wide, batch))
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-6)


@pytest.mark.parametrize("term", ["projected_kl", *TERMS])
def test_tokens_that_no_teacher_speaks_of_are_left_to_the_text(cross: CrossStore, tmp_path: Path, term: str) -> None:
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough")
    batch = silenced(stream.collate(next(iter(stream))))
    found = measured(student, stream, batch, objective_of(term, ce=0.25), 1.0)
    silent = gradients(student.model)
    text = measured(student, stream, batch, Objective({"ce": 1.25}), 1.0)
    assert found.total.item() == pytest.approx(text.total.item(), rel=1e-6)
    assert {name: value.item() for name, value in found.terms.items() if name != "ce"} == {
        f"{term}/a": 0.0,
        f"{term}/b": 0.0,
    }
    assert_gradients_close(silent, gradients(student.model), 1e-5)


def silenced(batch: Batch) -> Batch:
    """As if nothing had been stored of the teachers."""

    def silent(teacher: TeacherBatch) -> TeacherBatch:
        none = torch.zeros_like(teacher.has_row)
        nowhere = torch.full_like(teacher.spans.of_token, -1)
        no_spans = {name: getattr(teacher.spans, name)[:0] for name in ("last", "following", "logprob")}
        spans = replace(teacher.spans, of_token=nowhere, is_single=none, **no_spans)
        return replace(teacher, has_row=none, num_written=torch.zeros_like(teacher.num_written), spans=spans)

    return replace(batch, teachers=tuple(map(silent, batch.teachers)))


@pytest.mark.parametrize("weighting", ["static", "ce", "select"])
def test_every_token_is_charged_exactly_once_by_each_term(
    cross: CrossStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighting: str
) -> None:
    """With a nat for each token, whoever charges it, a batch costs its number of tokens."""
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough", teacher_weights={"a": 3, "b": 1})
    batch = stream.collate(next(iter(stream)))
    # Terms that charge a span at one token do not go with shares that vary from token to token.
    others = {"gold": 1.0, "chunk_likelihood": 0.25} if weighting == "static" else {"xtoken_pkl": 1.0, "kl": 0.25}
    objective = Objective({"uld": 0.5, "ce": 2.0, **others}, teacher_weighting=weighting)
    loss, seen = BatchLoss(objective, stream.data.teachers, 1.0, student), set[str]()

    def of_one(name: str, term: Term) -> Term:
        def charge(head: StudentHead, batch: Batch, teacher: TeacherBatch) -> Charge:
            found = term(head, batch, teacher)
            seen.add(name)
            return found._replace(loss_N=torch.where(found.speaks_N, 1.0, torch.nan))

        return charge

    loss._terms = [{name: of_one(name, term) for name, term in terms.items()} for terms in loss._terms]
    logprobs = StudentHead.logprobs

    def minus_one(head: StudentHead) -> Tensor:
        return logprobs(head) * 0 - 1

    monkeypatch.setattr(StudentHead, "logprobs", minus_one)
    with torch.no_grad():
        found = loss(student, batch)
    assert seen == {"uld", *others}
    assert not torch.stack([teacher.has_row for teacher in batch.teachers]).any(0).all()  # nobody speaks of some
    assert found.total.item() == pytest.approx(3.75 * batch.num_charged)


@pytest.mark.parametrize("term", ["uld", "gold", "xtoken_hkl"])
def test_terms_by_rank_refuse_signals_without_ranks(small: SmallStore, tmp_path: Path, term: str) -> None:
    student, stream = make_student(small, tmp_path, "other"), open_stream(small, "other", selection="threshold")
    with pytest.raises(ConfigError, match=rf"{term} pairs tokens by rank, .*threshold.*--select topk:64"):
        BatchLoss(objective_of(term), stream.data.teachers, 1.0, student)


@pytest.mark.parametrize("term", ["uld", "gold", "xtoken_hkl"])
def test_train_refuses_them_in_one_line_before_anything_is_written(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], term: str
) -> None:
    make_student(small, tmp_path, "other")
    ran = run_here(
        capsys,
        *("train", small.url, "--dataset", "mixed", "--student-config", str(tmp_path / "student.json")),
        *("--student-tokenizer", small.other, "--selection", "threshold", "--objective", f"{term}:0.5,ce:0.5"),
        *("--output", str(tmp_path / "run"), "--seq-length", "64", "--batch-tokens", "192", "--max-steps", "2"),
    )
    assert f"objective: {term} pairs tokens by rank" in ran.refusal()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_chunks_without_scalars_are_compared_on_request_only(cross: CrossStore, tmp_path: Path) -> None:
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough")
    whole = stream.data.teachers
    bare = tuple(replace(teacher, scalars=None) for teacher in whole)
    with pytest.raises(ConfigError, match=r"mass of a boundary, and teacher 'a' has no scalars.*--no-debias"):
        BatchLoss(objective_of("chunk_likelihood"), bare, 1.0, student)
    batch = stream.collate(next(iter(stream)))
    found, expected = (BatchLoss(objective_of(BIASED), each, 1.0, student)(student, batch) for each in (bare, whole))
    assert found.total.item() == expected.total.item()


def test_chunks_are_not_compared_by_classes_alone(cross: CrossStore, tmp_path: Path) -> None:
    student, stream = cross.student(tmp_path, "rough"), cross.stream("rough", dataset="whole", projected=True)
    bare = tuple(replace(teacher, scalars=None) for teacher in stream.data.teachers)
    with pytest.raises(
        ConfigError, match=r"log-probs of the text, .*teacher 'a' has no scalars.*--signals scalars,sparse$"
    ):
        BatchLoss(objective_of(BIASED), bare, 1.0, student)
