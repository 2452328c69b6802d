"""The whole loss of a batch, with its gradients, against a dense float64 reference that runs every document alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from cross_store import CrossStore
from small_store import SEQUENCE_LENGTH, SmallStore, make_student, open_stream
from torch import Tensor

from logitstore.consumer.batch_loss import BatchLoss, LossSums
from logitstore.consumer.batches import Batch
from logitstore.consumer.objectives import parse_objective
from logitstore.consumer.projection import student_groups
from logitstore.consumer.rows import TeacherRows
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.student import Student
from logitstore.consumer.teacher_batches import TeacherBatch
from logitstore.consumer.teacher_columns import TeacherColumns
from logitstore.vocabulary_maps import VocabularyMaps

GRANITE = {"model_type": "granite", "logits_scaling": 3.0}
PHI = {"model_type": "phi", "num_key_value_heads": 2}  # the head has a bias


def dense_logits(model: torch.nn.Module, bins: list[PlacedBin]) -> Tensor:
    """[N, V] logits for the charged tokens, each piece of a document in a forward of its own."""
    found = []
    for block, pieces in bins:
        for piece in pieces:
            ids = torch.from_numpy(block.tokens.ids[piece.begin : piece.end - 1]).long()
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            found.append(logits[torch.from_numpy(block.charged[piece.begin + 1 : piece.end])])
    return torch.cat(found)


def dense_loss(
    model: torch.nn.Module, stream: Stream, bins: list[PlacedBin], objective: str, temperature: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Total and terms, by the formulas of the documentation on full distributions."""
    weights, batch = parse_objective(objective), stream.collate(bins)
    logits = dense_logits(model, bins)
    ce = -logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    terms, total = {"ce": ce.sum()}, weights.weight("ce") * ce.sum()
    for columns, teacher in zip(stream.data.teachers, batch.teachers, strict=True):
        q, q_at_one = ((logits / each).softmax(-1) for each in (temperature, 1.0))
        kl, charged = torch.zeros((), dtype=torch.float64), ce.sum() * 0
        for n in range(batch.num_charged):
            if columns.maps is None:
                found = (dense_kl(q[n], teacher.rows, n), 0.0) if teacher.has_row[n] else None
            else:
                found = dense_class_kl(q[n], q_at_one[n], columns, teacher, int(batch.targets[n]), n, temperature)
            if found is None:
                charged = charged + ce[n]
                continue
            kl = kl + temperature**2 * found[0]
            charged = charged + temperature**2 * found[0] + found[1]
        terms[f"kl/{columns.name}"] = kl
        total = total + weights.weight("kl") * columns.weight * charged
    return total, terms


def dense_class_kl(
    q: Tensor, q_at_one: Tensor, columns: TeacherColumns, teacher: TeacherBatch, token: int, n: int, temperature: float
) -> tuple[Tensor, Tensor] | None:
    """KL on the cells of ``projected_kl`` at one token, and what the text is charged with beside; None: nothing."""
    maps = columns.maps
    groups, _ = student_groups(maps.classes, len(q))
    p, rest, first = target_of(teacher, maps, groups.tolist(), n, temperature)
    realised = int(groups[token])
    if first != realised:
        return None
    cells = {frozenset((groups == c).nonzero()[:, 0].tolist()): mass for c, mass in p.items()}
    within = torch.zeros((), dtype=torch.float64)
    of_token = mass_of_several(teacher, maps, token, n) if temperature == 1 else None
    if of_token is None:
        within = q_at_one[groups == realised].sum().log() - q_at_one[token].log()
    else:
        whole = next(cell for cell in cells if token in cell)
        left = max(0.0, cells.pop(whole) - of_token)
        cells[frozenset([token])] = of_token
        if whole - {token}:
            cells[whole - {token}] = left
        else:
            rest += left
    loss, listed = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for cell, mass in cells.items():
        of_cell = q[list(cell)].sum()
        listed = listed + of_cell
        loss = loss - mass * of_cell.log()
        if teacher.rows.log_rest_N is not None and mass > 0:
            loss = loss + mass * math.log(mass)
    if teacher.rows.log_rest_N is None and teacher.has_row[n]:
        rest = 0.0  # of a sample's rest only that is charged which is known: inside a teacher's token
    if rest > 0:
        known = 0.0 if teacher.rows.log_rest_N is None else math.log(rest)
        loss = loss + rest * (known - (1 - listed).log())
    return loss, within


def entries_of(rows: TeacherRows, n: int) -> list[tuple[int, float]]:
    masses = rows.log_masses_NK[n].double().exp().tolist()
    return [(token, mass) for token, mass in zip(rows.ids_NK[n].tolist(), masses, strict=True) if token >= 0]


def pieces_of(maps: VocabularyMaps, token: int) -> list[int]:
    """Student tokens that a teacher token is cut into; none for padding of its head."""
    return (
        [piece for piece in maps.teacher_pieces[token].tolist() if piece >= 0]
        if token < len(maps.teacher_pieces)
        else []
    )


def open_token_of(teacher: TeacherBatch, maps: VocabularyMaps, n: int) -> tuple[list[tuple[int, float]], float, bool]:
    """The student's next tokens by going on with an open token, the share of an end, and whether the text goes on."""
    written = teacher.written[n].tolist()[: int(teacher.num_written[n])]
    going_on, end, is_text = [], 0.0, False
    for place, (entry, mass) in enumerate(entries_of(teacher.open_rows, n) if written else []):
        pieces = pieces_of(maps, entry)
        if (teacher.has_row[n] and place == 0) or pieces == written:
            end += mass
        elif pieces[: len(written)] == written:
            going_on.append((pieces[len(written)], mass))
            is_text |= place == 0
    total = end + sum(mass for _, mass in going_on)
    return [(piece, mass / total) for piece, mass in going_on], end / total if total else 1.0, is_text


def target_of(
    teacher: TeacherBatch, maps: VocabularyMaps, groups: list[int], n: int, temperature: float
) -> tuple[dict[int, float], float, int]:
    """Mass by class, the rest, and the class of what the text goes on with (-1: nothing is known)."""
    of_teacher = dict(enumerate(maps.classes.teacher_class.tolist()))
    going_on, end, is_text = open_token_of(teacher, maps, n) if temperature == 1 else ([], 1.0, False)
    p: dict[int, float] = {}
    for piece, mass in going_on:
        p[groups[piece]] = p.get(groups[piece], 0.0) + mass
    if not teacher.has_row[n]:
        return p, end, groups[going_on[0][0]] if is_text else -1
    rest = 0.0 if teacher.rows.log_rest_N is None else end * math.exp(teacher.rows.log_rest_N[n])
    entries = entries_of(teacher.rows, n)
    for entry, mass in entries:
        found = of_teacher.get(entry, -1)
        if found >= 0:
            p[found] = p.get(found, 0.0) + end * mass
        else:
            rest += end * mass
    return p, rest, of_teacher.get(entries[0][0], -1)


def mass_of_several(teacher: TeacherBatch, maps: VocabularyMaps, token: int, n: int) -> float | None:
    """What the row gives to the realised token where the teacher writes it with several tokens; None elsewhere."""
    continuation = float(teacher.spans.continuation[n])
    if not (teacher.has_row[n] and teacher.spans.is_single[n] and continuation < 0):
        return None
    entries = entries_of(teacher.rows, n)
    of_class = int(maps.classes.student_class[token])
    begin_with = [
        mass
        for entry, mass in entries
        if pieces_of(maps, entry)[:1] == [token] != pieces_of(maps, entry)
        and maps.classes.teacher_class[entry] == of_class
    ]
    going_on, end, _ = open_token_of(teacher, maps, n)
    goes_on = sum(mass for piece, mass in going_on if piece == token)
    return end * (entries[0][1] * math.exp(continuation) + sum(begin_with)) + goes_on


def dense_kl(q: Tensor, rows: TeacherRows, n: int) -> Tensor:
    """What row ``n`` of a teacher charges a distribution, [C]."""
    kept = rows.ids_NK[n] >= 0
    listed_q, listed_p = q[rows.ids_NK[n][kept]], rows.log_masses_NK[n][kept].double().exp()
    if rows.log_rest_N is None:
        return -(listed_p * listed_q.log()).sum()
    rest_p = rows.log_rest_N[n].double().exp()
    listed = torch.special.xlogy(listed_p, listed_p / listed_q).sum()
    return listed + torch.special.xlogy(rest_p, rest_p / (1 - listed_q.sum()))


def measured(student: Student, stream: Stream, batch: Batch, objective: str, temperature: float) -> LossSums:
    loss = BatchLoss(parse_objective(objective), stream.data.teachers, temperature, student)
    student.model.zero_grad()
    found = loss(student, batch)
    found.total.backward()
    return found


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < tolerance, f"{name}: {error}"


CASES = [
    pytest.param("tokenizer", "topk", 1.0, "kl:0.9,ce:0.1", {}, id="top-k"),
    pytest.param("tokenizer", "topk", 2.0, "kl:0.9,ce:0.1", {}, id="top-k at temperature 2"),
    pytest.param("tokenizer", "topk", 2.0, "kl", {}, id="kl only"),
    pytest.param("tokenizer", "threshold", 1.0, "kl:0.9,ce:0.1", {}, id="threshold"),
    pytest.param("other", "topk", 1.0, "kl:0.9,ce:0.1", {}, id="another tokenizer, top-k"),
    pytest.param("other", "topk", 2.0, "kl:0.5,ce:0.5", {}, id="another tokenizer, top-k at temperature 2"),
    pytest.param("other", "threshold", 1.0, "kl:0.9,ce:0.1", {}, id="another tokenizer, threshold"),
    pytest.param("tokenizer", "topk", 1.0, "kl:0.9,ce:0.1", {"tie_word_embeddings": True}, id="tied embeddings"),
    pytest.param("tokenizer", "topk", 2.0, "kl:0.9,ce:0.1", PHI, id="bias of the head"),
    pytest.param("other", "threshold", 1.0, "kl:0.9,ce:0.1", GRANITE, id="scaled logits"),
]


@pytest.mark.parametrize(("tokenizer", "selection", "temperature", "objective", "options"), CASES)
def test_loss_agrees_with_a_dense_float64_reference(
    small: SmallStore,
    tmp_path: Path,
    tokenizer: str,
    selection: str,
    temperature: float,
    objective: str,
    options: dict[str, object],
) -> None:
    student = make_student(small, tmp_path, tokenizer, **options)
    weights = {"big": 0.7, "small": 0.3}
    stream = open_stream(
        small, tokenizer, selection=selection, temperature=temperature, teacher_weights=weights, sequences=3
    )
    bins = next(bins for bins in stream if max(len(pieces) for _, pieces in bins) > 1)  # something is packed
    found = measured(student, stream, stream.collate(bins), objective, temperature)
    reference = copy.deepcopy(student.model).double()
    reference.zero_grad()
    total, terms = dense_loss(reference, stream, bins, objective, temperature)
    total.backward()
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert {name: term.item() for name, term in found.terms.items()} == pytest.approx(
        {name: term.item() for name, term in terms.items()}, rel=1e-5
    )
    assert_gradients_close(gradients(student.model), gradients(reference))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_agrees_with_the_reference_where_tokenizers_cut_inside_each_others_tokens(
    cross: CrossStore, tmp_path: Path, temperature: float
) -> None:
    student = cross.student(tmp_path, "rough")
    stream = cross.stream("rough", temperature=temperature, teacher_weights={"a": 0.7, "b": 0.3})
    bins = next(iter(stream))
    batch = stream.collate(bins)
    inside = [~teacher.has_row & (teacher.num_written > 0) for teacher in batch.teachers]
    several = [teacher.spans.is_single & (teacher.spans.continuation < 0) for teacher in batch.teachers]
    assert all(bool(each.any()) for each in inside + several)
    found = measured(student, stream, batch, "kl:0.9,ce:0.1", temperature)
    reference = copy.deepcopy(student.model).double()
    reference.zero_grad()
    total, terms = dense_loss(reference, stream, bins, "kl:0.9,ce:0.1", temperature)
    total.backward()
    assert found.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert {name: term.item() for name, term in found.terms.items()} == pytest.approx(
        {name: term.item() for name, term in terms.items()}, rel=1e-5
    )
    assert_gradients_close(gradients(student.model), gradients(reference))


def test_loss_on_text_alone_needs_no_teacher(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small, teacher_weights={})
    bins = next(iter(stream))
    found = measured(student, stream, stream.collate(bins), "ce", 1.0)
    expected, _ = dense_loss(copy.deepcopy(student.model).double(), stream, bins, "ce", 1.0)
    assert found.terms.keys() == {"ce"}
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
def test_loss_is_the_sum_of_its_slices(small: SmallStore, tmp_path: Path, tokenizer: str) -> None:
    """With one denominator, accumulation over any slices is the whole batch."""
    student, stream = make_student(small, tmp_path, tokenizer), open_stream(small, tokenizer)
    bins = next(iter(stream))
    loss = BatchLoss(parse_objective("kl:0.9,ce:0.1"), stream.data.teachers, 1.0, student)
    whole = measured(student, stream, stream.collate(bins), "kl:0.9,ce:0.1", 1.0)
    expected = gradients(student.model)
    for size in (1, 3):
        student.model.zero_grad()
        total = 0.0
        for begin in range(0, len(bins), size):
            found = loss(student, stream.collate(bins[begin : begin + size]))
            found.total.backward()
            total += found.total.item()
        assert total == pytest.approx(whole.total.item(), rel=1e-5)
        assert_gradients_close(gradients(student.model), expected)


def test_packed_documents_do_not_see_each_other(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    bins = next(iter(stream))
    alone = [(block, (piece,)) for block, pieces in bins for piece in pieces]
    assert len(alone) > len(bins)
    packed = measured(student, stream, stream.collate(bins), "kl:0.5,ce:0.5", 1.0)
    expected = gradients(student.model)
    single = measured(student, stream, stream.collate(alone), "kl:0.5,ce:0.5", 1.0)
    assert packed.total.item() == pytest.approx(single.total.item(), rel=1e-5)
    assert_gradients_close(gradients(student.model), expected)


def test_padding_contributes_nothing(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small, length=2 * SEQUENCE_LENGTH)
    # Bins of short sequences in longer ones: half is padding, with whatever ids.
    bins = next(iter(open_stream(small)))
    batch = stream.collate(bins)
    padded = batch.input_ids.clone()
    padded[:, SEQUENCE_LENGTH:] = torch.randint(4, 300, padded[:, SEQUENCE_LENGTH:].shape)
    first = measured(student, stream, batch, "kl:0.5,ce:0.5", 1.0)
    expected = gradients(student.model)
    second = measured(student, stream, replace(batch, input_ids=padded), "kl:0.5,ce:0.5", 1.0)
    assert first.total.item() == second.total.item()
    assert_gradients_close(gradients(student.model), expected, 1e-6)


def test_positions_without_a_teacher_row_are_charged_in_full_by_the_text(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path, "other"), open_stream(small, "other")
    batch = stream.collate(next(iter(stream)))
    none = torch.zeros(batch.num_charged, dtype=torch.bool)
    silent = replace(batch, teachers=tuple(replace(teacher, has_row=none) for teacher in batch.teachers))
    with_none = measured(student, stream, silent, "kl:0.9,ce:0.25", 1.0)
    expected = gradients(student.model)
    assert {name: value.item() for name, value in with_none.terms.items() if name != "ce"} == {
        "kl/big": 0.0,
        "kl/small": 0.0,
    }
    text = measured(student, stream, batch, "ce:1.15", 1.0)
    assert with_none.total.item() == pytest.approx(text.total.item(), rel=1e-6)
    assert_gradients_close(gradients(student.model), expected, 1e-5)


def test_loss_of_no_charged_tokens_is_zero_and_has_a_gradient(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    (block, pieces), *_ = next(iter(stream))
    batch = stream.collate([(replace(block, charged=block.charged & False), pieces)])
    assert batch.num_charged == 0
    found = measured(student, stream, batch, "kl:0.5,ce:0.5", 1.0)
    assert found.total.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(student.model).values())


def test_teachers_wider_than_the_students_head_leave_their_padding_to_the_rest(
    small: SmallStore, tmp_path: Path
) -> None:
    """A teacher's rows may list padding of its head (ids past the tokenizer), which this student's head has not got."""
    vocabulary = open_stream(small).data.vocab_size
    student, stream = make_student(small, tmp_path, vocab_size=vocabulary), open_stream(small, sequences=8)
    for bins in islice(iter(stream), 3):
        batch = stream.collate(bins)
        assert max(int(teacher.rows.ids_NK.max()) for teacher in batch.teachers) < vocabulary
        assert torch.isfinite(measured(student, stream, batch, "kl:0.9,ce:0.1", 1.0).total)
