"""Which columns a student reads, what is charged, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import build_bytelevel_tokenizer
from small_store import SmallStore

from logitstore.consumer.data import TrainingData
from logitstore.documents import TRAINABLE_ROLES
from logitstore.errors import ConfigError, TrainingError
from logitstore.parts import Part
from logitstore.signals import SparseSignal, read_sparse
from logitstore.sparse import SparseRows
from logitstore.text_parts import read_documents_of
from logitstore.tokenizer import Tokenizer


def open_data(small: SmallStore, tokenizer: str | None = None, **options: object) -> TrainingData:
    options = {"selection": "topk", **options}
    student = Tokenizer.from_folder(tokenizer or small.tokenizer)
    return TrainingData.open(small.store, small.version, student, **options)  # type: ignore[arg-type]


def test_open_weighs_all_teachers_equally_by_default(small: SmallStore) -> None:
    assert {teacher.name: teacher.weight for teacher in open_data(small).teachers} == {"big": 0.5, "small": 0.5}


def test_open_makes_weights_sum_to_one_and_drops_teachers_of_none(small: SmallStore) -> None:
    data = open_data(small, teacher_weights={"small": 3, "big": 1})
    assert [(teacher.name, teacher.weight) for teacher in data.teachers] == [("small", 0.75), ("big", 0.25)]
    assert [teacher.name for teacher in open_data(small, teacher_weights={"small": 3, "big": 0}).teachers] == ["small"]
    assert open_data(small, teacher_weights={}).teachers == ()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"tall": 1.0}, "no teacher 'tall'.*big"),
        ({"big": -1.0}, "'big' is -1"),
        ({"big": float("nan")}, "'big' is nan"),
        ({"big": 0.0}, "no teacher has a positive weight"),
    ],
)
def test_open_refuses_impossible_weights(small: SmallStore, weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_data(small, teacher_weights=weights)


def test_open_chooses_a_signal_by_policy_or_by_name(small: SmallStore) -> None:
    for selection in ("topk", "topk:6"):
        assert open_data(small, selection=selection).teachers[0].sparse.template["selection"]["k"] == "6"
    assert "theta" in open_data(small, selection="threshold").teachers[0].sparse.template["selection"]


def test_open_names_the_signals_there_are_when_it_cannot_choose(small: SmallStore) -> None:
    with pytest.raises(ConfigError, match=r"several sparse signals .*topk:6.* --selection"):
        open_data(small, selection=None)
    with pytest.raises(ConfigError, match=r"no such signal; it has: .*topk:6"):
        open_data(small, selection="topk:7")


def test_open_names_the_command_for_a_tokenizer_without_tokens(small: SmallStore) -> None:
    with pytest.raises(TrainingError, match=r"logitstore align .*--dataset mixed --student-tokenizer"):
        open_data(small, small.stranger)


def test_open_names_the_command_for_tokens_without_an_alignment(small: SmallStore) -> None:
    columns = tuple(column for column in small.version.manifest.columns if column.kind != "alignment")
    version = replace(small.version, manifest=replace(small.version.manifest, columns=columns))
    with pytest.raises(TrainingError, match=r"not their alignment .*logitstore align .*--student-tokenizer"):
        TrainingData.open(small.store, version, Tokenizer.from_folder(small.other), selection="topk")


def test_open_refuses_a_dataset_without_a_teacher(small: SmallStore) -> None:
    columns = tuple(column for column in small.version.manifest.columns if column.kind != "signal")
    version = replace(small.version, manifest=replace(small.version.manifest, columns=columns))
    student = Tokenizer.from_folder(small.tokenizer)
    with pytest.raises(TrainingError, match=r"no teacher.*--objective ce"):
        TrainingData.open(small.store, version, student)
    assert TrainingData.open(small.store, version, student, teacher_weights={}).train_blocks


def test_check_temperature_refuses_what_is_not_stored(small: SmallStore) -> None:
    data = open_data(small)
    data.check_temperature(1.0)
    data.check_temperature(2.0)
    with pytest.raises(ConfigError, match=r"1, 2 only; produce again with `--temperatures 1,1\.5`"):
        data.check_temperature(1.5)
    with pytest.raises(ConfigError, match="cannot be served from sampled entries"):
        open_data(small, selection="threshold").check_temperature(2.0)


def test_holes_leave_blocks_out_and_partial_scalars_unused(small: SmallStore) -> None:
    manifest = small.version.manifest
    first = next(n for n, block in enumerate(manifest.plan.blocks) if block.split == "train")

    def with_hole(kind: str, **fields: object) -> TrainingData:
        columns = [
            replace(column, cells=tuple(None if n == first else cell for n, cell in enumerate(column.cells)))
            if column in list(manifest.find(kind, **fields))
            else column
            for column in manifest.columns
        ]
        version = replace(small.version, manifest=replace(manifest, columns=tuple(columns)))
        return TrainingData.open(small.store, version, Tokenizer.from_folder(small.tokenizer), selection="topk")

    data = with_hole("signal", signal="sparse")
    assert data.num_holes == 1
    assert first not in data.train_blocks
    assert all(teacher.scalars is not None for teacher in data.teachers)
    data = with_hole("signal", signal="scalars")
    assert data.num_holes == 0
    assert all(teacher.scalars is None for teacher in data.teachers)


def test_document_ends_are_those_of_the_loaded_block(small: SmallStore) -> None:
    data = open_data(small)
    for block in data.train_blocks:
        np.testing.assert_array_equal(data.document_ends(block), data.load(block).tokens.ends)


def test_load_charges_every_token_but_each_documents_first(small: SmallStore) -> None:
    data = open_data(small, small.other)
    for number in data.train_blocks:
        block = data.load(number)
        assert np.flatnonzero(~block.charged).tolist() == block.tokens.begins.tolist()


@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
def test_answers_charge_exactly_the_tokens_that_end_in_an_answer_and_its_end_of_turn(
    small: SmallStore, tokenizer: str
) -> None:
    data = open_data(small, getattr(small, tokenizer), loss_on="answers")
    text, kinds = next(small.version.manifest.find("text")), set()
    for number in data.train_blocks:
        block = data.load(number)
        documents = read_documents_of(small.store.column_part(text, number))
        for document, begin, end in zip(documents, block.tokens.begins, block.tokens.ends, strict=True):
            roles = [segment.role for segment in document.segments for _ in segment.content.encode()]
            expected, place, role = [], 0, ""
            for token in range(begin, end):
                length = int(block.tokens.byte_lengths[token])
                place += length
                is_close = length == 0 and token > begin and block.tokens.byte_lengths[token - 1] > 0
                role = roles[place - 1] if length else role
                expected.append(bool(role in TRAINABLE_ROLES and (length or is_close) and token > begin))
            assert block.charged[begin:end].tolist() == expected
            kinds.add(document.segments[0].role)
    assert kinds >= {"text", "prompt", "user"}


def test_open_takes_a_tokenizer_with_another_template_for_another(small: SmallStore, tmp_path: Path) -> None:
    texts = [json.dumps({"text": "x"})]
    folder = build_bytelevel_tokenizer(tmp_path / "t", 300, texts, chat_template=None)
    with pytest.raises(TrainingError, match="has no tokens"):
        open_data(small, folder)


@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
def test_rows_that_were_not_scored_speak_of_no_token(
    small: SmallStore, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may cover a part of its documents only; alignments cover them whole."""
    data = open_data(small, getattr(small, tokenizer))
    whole = data.load(data.train_blocks[0]).teachers[0]
    half = whole.signal.rows.num_rows // 2

    def first_half(part: Part) -> SparseSignal:
        signal = read_sparse(part)
        rows, kept = signal.rows, signal.rows.offsets[half]
        offsets = np.minimum(rows.offsets, kept)
        return replace(signal, rows=SparseRows(offsets, rows.ids[:kept], rows.quanta[:kept], rows.draws[:kept]))

    monkeypatch.setattr("logitstore.consumer.data.read_sparse", first_half)
    block = data.load(data.train_blocks[0])
    expected = np.where(whole.row_of < half, whole.row_of, -1)
    assert (expected != whole.row_of).any()
    np.testing.assert_array_equal(block.teachers[0].row_of, expected)
    assert block.charged.sum() == len(block.charged) - len(block.tokens.ends)
