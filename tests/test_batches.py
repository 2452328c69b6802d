"""Batches against loops that anyone can read: inputs, targets and the very rows that the store holds for each token."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_store import SEQUENCE_LENGTH, THETA, SmallStore, open_stream

from logitstore.alignment_parts import read_pairs
from logitstore.consumer.batches import Batch
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.signals import START_CLASSES, read_scalars, read_sparse


def all_bins(stream: Stream) -> list[list[PlacedBin]]:
    """The batches of the first epoch."""
    batches = iter(stream)
    return [next(batches) for _ in range(stream.num_batches(0))]


def charged_tokens(bins: list[PlacedBin]) -> list[tuple[PlacedBin, int]]:
    """In the order of a batch: each charged token, as (its bin, its index in the block)."""
    return [
        (placed, token)
        for placed in bins
        for piece in placed[1]
        for token in range(piece.begin + 1, piece.end)
        if placed[0].charged[token]
    ]


class Stored:
    """What the store holds, decoded once: by block of the plan, found by the tokens that it has."""

    def __init__(self, small: SmallStore, stream: Stream) -> None:
        self.store, self.stream = small.store, stream
        data = stream.data
        self.numbers = {data.load(number).tokens.ids.tobytes(): number for number in data.train_blocks}
        self.signals = [
            {n: read_sparse(self.store.column_part(teacher.sparse, n)) for n in data.train_blocks}
            for teacher in data.teachers
        ]

    def block(self, placed: PlacedBin) -> int:
        return self.numbers[placed[0].tokens.ids.tobytes()]

    def row(self, teacher: int, block: int, row: int, temperature: float) -> dict[int, float]:
        """The entries of one row as {id: weight}, and under -1 the mass outside, by the text of the documentation."""
        signal = self.signals[teacher][block]
        begin, end = signal.rows.offsets[row], signal.rows.offsets[row + 1]
        ids, quanta, draws = (getattr(signal.rows, name)[begin:end].tolist() for name in ("ids", "quanta", "draws"))
        if signal.draw_weight is not None:
            return {
                token: THETA * drawn if drawn else math.exp(-quantum * 0.1)
                for token, quantum, drawn in zip(ids, quanta, draws, strict=True)
            }
        masses = {token: math.exp(-quantum * 0.1 / temperature) for token, quantum in zip(ids, quanta, strict=True)}
        masses[-1] = math.exp(signal.rest[row, signal.temperatures.index(temperature)])
        total = sum(masses.values())
        return {token: mass / total for token, mass in masses.items()}


@pytest.mark.parametrize("loss_on", ["all", "answers"])
@pytest.mark.parametrize("length", [16, SEQUENCE_LENGTH])
def test_collate_agrees_with_a_naive_loop(small: SmallStore, loss_on: str, length: int) -> None:
    stream = open_stream(small, loss_on=loss_on, length=length, teacher_weights={})
    for bins in all_bins(stream):
        batch = stream.collate(bins)
        ids, positions = batch.input_ids.tolist(), batch.position_ids.tolist()
        outputs, targets, num_bytes, num_tokens = [], [], 0, 0
        for line, (block, pieces) in enumerate(bins):
            column = 0
            for piece in pieces:
                for position, token in enumerate(range(piece.begin, piece.end - 1)):
                    assert ids[line][column] == block.tokens.ids[token]
                    assert positions[line][column] == position
                    if block.charged[token + 1]:
                        outputs.append(line * length + column)
                        targets.append(block.tokens.ids[token + 1])
                        num_bytes += block.tokens.byte_lengths[token + 1]
                    column += 1
            num_tokens += column
            assert positions[line][column:] == list(range(length - column))
        assert (batch.outputs.tolist(), batch.targets.tolist()) == (outputs, targets)
        assert (batch.num_bytes, batch.num_tokens, batch.num_charged) == (num_bytes, num_tokens, len(targets))


def test_collate_charges_only_answers_when_asked(small: SmallStore) -> None:
    everything, answers = (open_stream(small, loss_on=which, teacher_weights={}) for which in ("all", "answers"))
    counts = [sum(s.collate(bins).num_charged for bins in all_bins(s)) for s in (everything, answers)]
    assert 0 < counts[1] < counts[0]


def batch_row(batch: Batch, teacher: int, position: int) -> dict:
    rows = batch.teachers[teacher].rows
    masses = {
        token: math.exp(mass)
        for token, mass in zip(rows.ids_NK[position].tolist(), rows.log_masses_NK[position].tolist(), strict=True)
        if token >= 0
    }
    return masses if rows.log_rest_N is None else masses | {-1: math.exp(rows.log_rest_N[position])}


@pytest.mark.parametrize(("selection", "temperature"), [("topk", 1.0), ("topk", 2.0), ("threshold", 1.0)])
def test_teacher_rows_are_those_of_the_very_token(small: SmallStore, selection: str, temperature: float) -> None:
    stream = open_stream(small, selection=selection, temperature=temperature)
    vocabulary, stored = stream.data.vocab_size, Stored(small, stream)
    for bins in all_bins(stream)[:4]:
        batch = stream.collate(bins)
        for teacher in range(2):
            batch.teachers[teacher].rows.validate()
            assert batch.teachers[teacher].has_row.all()
            for position, (placed, token) in list(enumerate(charged_tokens(bins)))[::7]:
                expected = stored.row(teacher, stored.block(placed), token, temperature)
                # What a teacher's wider head gives to padding is outside the rows.
                lost = sum(expected.pop(token) for token in list(expected) if token >= vocabulary)
                if selection == "topk":
                    expected[-1] += lost
                assert batch_row(batch, teacher, position) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("selection", "temperature"), [("topk", 2.0), ("threshold", 1.0)])
def test_teacher_rows_of_another_tokenizer_are_those_of_the_paired_token(
    small: SmallStore, selection: str, temperature: float
) -> None:
    stream = open_stream(small, "other", selection=selection, temperature=temperature)
    stored, num_without = Stored(small, stream), 0
    pairs_of = aligned_tokens(small, stream)
    for bins in all_bins(stream)[:4]:
        batch = stream.collate(bins)
        for teacher in range(2):
            for position, (placed, token) in list(enumerate(charged_tokens(bins)))[::7]:
                pairs, has_row = pairs_of[stored.block(placed)], bool(batch.teachers[teacher].has_row[position])
                assert has_row == (token in pairs)
                num_without += not has_row
                if has_row:
                    expected = stored.row(teacher, stored.block(placed), pairs[token], temperature)
                    assert batch_row(batch, teacher, position) == pytest.approx(expected, rel=1e-4)
    assert num_without > 0


def aligned_tokens(small: SmallStore, stream: Stream) -> dict[int, dict[int, int]]:
    """By block: student token -> teacher token that begins at the same place."""
    column = stream.data.teachers[0].alignment
    assert column is not None
    found = {}
    for number in stream.data.train_blocks:
        teacher_rows, student_rows = read_pairs(small.store.column_part(column, number))
        found[number] = dict(zip(student_rows.tolist(), teacher_rows.tolist(), strict=True))
    return found


@pytest.mark.parametrize("length", [16, SEQUENCE_LENGTH])
@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
def test_spans_of_a_batch_are_whole_and_have_the_teachers_logprobs(
    small: SmallStore, tokenizer: str, length: int
) -> None:
    stream = open_stream(small, tokenizer, length=length)
    sizes = set()
    for bins in all_bins(stream)[:4]:
        batch = stream.collate(bins)
        spans, tokens = batch.teachers[0].spans, charged_tokens(bins)
        for number in range(spans.num_spans):
            mine = (spans.of_token == number).nonzero()[:, 0].tolist()
            (block, _), first = tokens[mine[0]]
            known = block.teachers[0].spans
            span = known.of_token[first]
            assert [tokens[n][1] for n in mine] == np.flatnonzero(known.of_token == span).tolist()
            assert spans.last[number] == mine[-1]
            assert spans.logprob[number] == known.logprob[span]
            assert (spans.continuation[mine] == known.continuation[span]).all()
            assert spans.is_single[mine].tolist() == [len(mine) == 1] * len(mine)
            after = int(spans.following[number])
            if after >= 0:
                assert after == mine[-1] + 1
                assert tokens[after][0] == tokens[mine[-1]][0]
                assert tokens[after][1] == tokens[mine[-1]][1] + 1
            sizes.add(len(mine))
    assert sizes == {1} if tokenizer == "tokenizer" else 1 in sizes


def test_scalars_of_a_batch_are_those_of_the_very_token(small: SmallStore) -> None:
    stream = open_stream(small)
    bins = all_bins(stream)[0]
    teacher, column, stored = stream.collate(bins).teachers[1], stream.data.teachers[1].scalars, Stored(small, stream)
    assert column is not None
    for position, (placed, token) in list(enumerate(charged_tokens(bins)))[::9]:
        scalars, _ = read_scalars(small.store.column_part(column, stored.block(placed)))
        assert teacher.entropy is not None
        assert teacher.starts is not None
        assert teacher.entropy[position] == scalars["entropy"][token]
        assert teacher.top_logprob[position] == scalars["argmax_logprob"][token]
        masses = [math.exp(scalars[f"starts@{name}"][token]) for name in START_CLASSES]
        assert teacher.starts[position].item() == pytest.approx(math.log(sum(masses)), abs=1e-5)
        assert teacher.spans.logprob[teacher.spans.of_token[position]] == pytest.approx(scalars["logprob"][token])
        assert teacher.likeliest[position] == scalars["argmax_id"][token]


@pytest.mark.parametrize("selection", ["topk", "threshold"])
def test_likeliest_token_is_found_among_the_entries_without_scalars(small: SmallStore, selection: str) -> None:
    """Where log-probs tie within their quantum it may be another, hence the share; sampled entries never win."""
    stream = open_stream(small, selection=selection)
    bins = all_bins(stream)[0]
    with_scalars = stream.collate(bins).teachers[0].likeliest
    bare = [
        (replace(block, teachers=tuple(replace(teacher, scalars=None) for teacher in block.teachers)), pieces)
        for block, pieces in bins
    ]
    assert (stream.collate(bare).teachers[0].likeliest == with_scalars).float().mean() > 0.9


def test_padding_never_matters(small: SmallStore) -> None:
    """The same bins in longer sequences: the same charged tokens, rows and bytes."""
    stream = open_stream(small)
    bins = all_bins(stream)[0]
    batch = stream.collate(bins)
    wider = open_stream(small, length=2 * SEQUENCE_LENGTH).collate(bins)
    assert torch.equal(batch.targets, wider.targets)
    assert torch.equal(batch.outputs % SEQUENCE_LENGTH, wider.outputs % (2 * SEQUENCE_LENGTH))
    for one, other in zip(batch.teachers, wider.teachers, strict=True):
        assert torch.equal(one.rows.ids_NK, other.rows.ids_NK)
        assert torch.equal(one.rows.log_masses_NK, other.rows.log_masses_NK)
    assert (batch.num_bytes, batch.num_tokens) == (wider.num_bytes, wider.num_tokens)


def test_batch_moves_to_a_device_with_all_its_tensors(small: SmallStore) -> None:
    stream = open_stream(small)
    batch = stream.collate(all_bins(stream)[0]).to("meta")
    rows = batch.teachers[0].rows
    tensors = [batch.input_ids, batch.targets, batch.outputs, rows.ids_NK, rows.log_rest_N, batch.teachers[0].likeliest]
    tensors.append(batch.teachers[0].spans.of_token)
    assert {tensor.device.type for tensor in tensors if tensor is not None} == {"meta"}
