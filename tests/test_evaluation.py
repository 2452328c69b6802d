"""Held-out measures against naive float64 ones."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from small_store import SmallStore, make_student, open_stream
from test_batch_loss import dense_logits, dense_loss

from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.evaluation import evaluate
from logitstore.consumer.objectives import parse_objective
from logitstore.consumer.projection import class_of, student_groups
from logitstore.consumer.student import Student


@pytest.mark.parametrize("loss_on", ["all", "answers"])
def test_evaluate_measures_cross_entropy_and_bits_per_byte(small: SmallStore, tmp_path: Path, loss_on: str) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small, teacher_weights={}, loss_on=loss_on)
    nats = num_tokens = num_bytes = 0
    for bins in stream.held_out():
        total, _ = dense_loss(copy.deepcopy(student.model).double(), stream, bins, "ce", 1.0)
        batch = stream.collate(bins)
        nats, num_tokens, num_bytes = nats + total.item(), num_tokens + batch.num_charged, num_bytes + batch.num_bytes
    assert evaluate(student, stream, "cpu") == pytest.approx(
        {"cross_entropy": nats / num_tokens, "bits_per_byte": nats / math.log(2) / num_bytes}, rel=1e-5
    )
    if loss_on == "all":
        assert num_bytes == sum(b.num_bytes for b in small.version.manifest.plan.blocks if b.split == "held_out")


@pytest.mark.parametrize(
    ("tokenizer", "selection", "temperature"),
    [
        ("tokenizer", "topk", 1.0),
        ("tokenizer", "topk", 2.0),
        ("tokenizer", "threshold", 1.0),
        ("other", "topk", 2.0),
        ("other", "threshold", 1.0),
    ],
)
def test_evaluate_measures_each_teacher_at_temperature_one(
    small: SmallStore, tmp_path: Path, tokenizer: str, selection: str, temperature: float
) -> None:
    student = make_student(small, tmp_path, tokenizer)
    stream = open_stream(small, tokenizer, selection=selection, temperature=temperature)
    plain = open_stream(small, tokenizer, selection=selection)
    kl, entropy, nats, agreements, num_rows, num_spoken, num_bytes = 0.0, 0.0, 0.0, 0, 0, 0, 0
    with torch.no_grad():
        for bins in plain.held_out():
            model = copy.deepcopy(student.model).double()
            teacher, columns = plain.collate(bins).teachers[0], plain.data.teachers[0]
            kl += dense_loss(model, plain, bins, "kl", 1.0)[1][f"kl/{columns.name}"].item()
            measure = BatchLoss(parse_objective("kl"), plain.data.teachers, 1.0, student)
            num_spoken += int(measure(student, plain.collate(bins)).num_spoken[f"kl/{columns.name}"])
            has_row = teacher.has_row
            likeliest = dense_logits(model, bins).argmax(-1)
            theirs = teacher.likeliest
            if columns.maps is not None:
                likeliest = student_groups(columns.maps.classes, student.head.shape[0])[0][likeliest]
                theirs = class_of(theirs, torch.tensor(columns.maps.classes.teacher_class))
            agreements += int((likeliest == theirs)[has_row].sum())
            num_rows += int(has_row.sum())
            num_bytes += plain.collate(bins).num_bytes
            if teacher.entropy is not None and tokenizer == "tokenizer":
                entropy += teacher.entropy[has_row].double().sum().item()
                nats -= teacher.spans.logprob.double().sum().item()
    found, name = evaluate(student, stream, "cpu"), plain.data.teachers[0].name
    assert found[f"top1_agreement/{name}"] == pytest.approx(agreements / num_rows)
    if selection == "topk":
        assert found[f"kl/{name}"] == pytest.approx(kl / num_spoken, rel=1e-4)
        assert found[f"kl/{name}"] > 0
    elif tokenizer == "tokenizer":
        assert found[f"kl/{name}"] == pytest.approx((kl - entropy) / num_rows, rel=1e-4)
    else:
        assert found[f"teacher_cross_entropy/{name}"] == pytest.approx(kl / num_spoken, rel=1e-4)
        assert f"kl/{name}" not in found
    if tokenizer == "tokenizer":
        assert found[f"teacher_bits_per_byte/{name}"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    else:
        assert f"teacher_bits_per_byte/{name}" not in found


def test_evaluate_does_not_depend_on_how_many_sequences_go_at_once(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    assert evaluate(student, stream, "cpu", 1) == pytest.approx(evaluate(student, stream, "cpu", 7), rel=1e-5)


def test_evaluate_is_empty_without_held_out_documents(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    stream.data.held_out_blocks = []
    assert evaluate(student, stream, "cpu") == {}


def test_evaluate_leaves_the_student_in_training_and_without_gradients(small: SmallStore, tmp_path: Path) -> None:
    student, stream = make_student(small, tmp_path), open_stream(small)
    student.model.train()
    evaluate(student, stream, "cpu")
    assert student.model.training
    assert all(parameter.grad is None for parameter in student.model.parameters())


def test_a_student_that_is_its_teacher_agrees_with_it(small: SmallStore) -> None:
    """The very teacher as the student: no divergence beyond the quantum of what is stored, and full agreement."""
    student = Student.load(small.teachers["big"])
    # Sequences as long as the teacher's windows, so that both see the same context.
    found = evaluate(student, open_stream(small, teacher_weights={"big": 1.0}, length=256), "cpu")
    assert 0 <= found["kl/big"] < 1e-3
    assert found["top1_agreement/big"] > 0.99
    assert found["bits_per_byte"] == pytest.approx(found["teacher_bits_per_byte/big"], rel=1e-2)
