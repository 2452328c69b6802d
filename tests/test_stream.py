"""The order of training: repeatable, resumable at any batch, complete in every epoch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from small_store import SEQUENCE_LENGTH, SmallStore

from logitstore.consumer import stream as stream_module
from logitstore.consumer.data import TrainingData
from logitstore.consumer.stream import PlacedBin, Stream, StreamConfig, StreamState
from logitstore.errors import ConfigError, TrainingError
from logitstore.tokenizer import Tokenizer


@pytest.fixture(params=[1, 2, 100], ids=lambda blocks: f"groups of {blocks}")
def group_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(stream_module, "_GROUP_BYTES", 2048 * request.param)
    return request.param


def open_stream(small: SmallStore, seed: int = 0, sequences: int = 3) -> Stream:
    student = Tokenizer.from_folder(small.tokenizer)
    data = TrainingData.open(small.store, small.version, student, teacher_weights={})
    length = SEQUENCE_LENGTH
    return Stream(data, StreamConfig(sequence_length=length, batch_tokens=length * sequences, seed=seed))


Fingerprint = tuple[tuple[bytes, tuple[tuple[int, int], ...]], ...]


def fingerprint(bins: list[PlacedBin]) -> Fingerprint:
    """A batch in a form that compares: the ids of each bin's block, and its pieces."""
    return tuple((block.tokens.ids.tobytes(), tuple((p.begin, p.end) for p in pieces)) for block, pieces in bins)


def take(stream: Stream, count: int) -> list[Fingerprint]:
    return [fingerprint(bins) for bins in islice(iter(stream), count)]


def epoch_of(stream: Stream, number: int = 0) -> list[Fingerprint]:
    before = sum(stream.num_batches(epoch) for epoch in range(number))
    return take(stream, before + stream.num_batches(number))[before:]


def test_stream_repeats_for_the_same_seed(small: SmallStore, group_blocks: int) -> None:
    assert take(open_stream(small), 40) == take(open_stream(small), 40)


def test_stream_differs_by_seed_and_by_epoch(small: SmallStore, group_blocks: int) -> None:
    first = epoch_of(open_stream(small))
    assert first != epoch_of(open_stream(small, seed=1))
    assert first != epoch_of(open_stream(small), 1)


def test_stream_has_every_bin_exactly_once_an_epoch(small: SmallStore, group_blocks: int) -> None:
    stream = open_stream(small)
    charged = sum(int(stream.data.load(block).charged.sum()) for block in stream.data.train_blocks)
    sets = []
    for number in range(3):
        bins = [bin_ for batch in epoch_of(open_stream(small), number) for bin_ in batch]
        assert len(set(bins)) == len(bins)
        assert sum(end - begin - 1 for _, pieces in bins for begin, end in pieces) == charged
        sets.append(set(bins))
    assert sets[0] == sets[1] == sets[2]


def test_num_batches_counts_what_an_epoch_has(small: SmallStore, group_blocks: int) -> None:
    stream, seen = open_stream(small), [0, 0, 0]
    for _ in islice(iter(stream), sum(stream.num_batches(epoch) for epoch in range(3))):
        seen[min(2, stream.state.epoch)] += 1
    # The state after an epoch's last batch is the beginning of the next.
    assert seen == [stream.num_batches(0) - 1, stream.num_batches(1), stream.num_batches(2) + 1]
    assert stream.state == replace(stream.state, epoch=3, group=0, batch=0)


def test_stream_batches_are_even_and_of_one_group(small: SmallStore, group_blocks: int) -> None:
    for batch in take(open_stream(small), 40):
        assert 1 <= len(batch) <= 3
        assert len({ids for ids, _ in batch}) <= group_blocks


def test_resume_from_any_state_gives_exactly_the_rest(small: SmallStore, group_blocks: int) -> None:
    stream = open_stream(small)
    total = stream.num_batches(0) + 5
    batches, states = [], [stream.state]
    for bins in islice(iter(stream), total):
        batches.append(fingerprint(bins))
        states.append(stream.state)
    for done in range(0, total, 3):
        resumed = open_stream(small)
        resumed.resume(StreamState.from_json(states[done].to_json()))
        assert take(resumed, total - done) == batches[done:]


def test_resume_refuses_another_dataset(small: SmallStore) -> None:
    stream = open_stream(small)
    with pytest.raises(TrainingError, match="--dataset-version"):
        stream.resume(replace(stream.state, manifest="0" * 64))


def test_resume_refuses_another_configuration(small: SmallStore) -> None:
    with pytest.raises(TrainingError, match="seed=1"):
        open_stream(small).resume(open_stream(small, seed=1).state)


def test_held_out_bins_are_of_held_out_blocks_and_leave_the_state_alone(small: SmallStore) -> None:
    stream = open_stream(small)
    before = stream.state
    held_out = [len(bins) for bins in stream.held_out(2)]
    assert stream.state == before
    assert held_out
    assert max(held_out) <= 2
    ids = {block.tokens.ids.tobytes() for bins in stream.held_out() for block, _ in bins}
    assert ids == {stream.data.load(number).tokens.ids.tobytes() for number in stream.data.held_out_blocks}
    assert ids.isdisjoint(place[0] for batch in epoch_of(stream) for place in batch)


def test_config_refuses_a_batch_of_less_than_a_sequence() -> None:
    with pytest.raises(ConfigError, match="--batch-tokens 63: less than one sequence"):
        StreamConfig(sequence_length=64, batch_tokens=63)


def test_stream_that_is_left_reads_no_further_blocks(small: SmallStore, group_blocks: int) -> None:
    stream, loaded = open_stream(small), []
    load = stream.data.load
    stream.data.load = lambda block: loaded.append(block) or load(block)  # type: ignore[method-assign]
    for _ in stream:
        break
    assert len(loaded) <= 2 * group_blocks


def test_stream_passes_on_what_reading_a_block_raises(small: SmallStore) -> None:
    stream = open_stream(small)

    def fail(block: int) -> None:
        raise OSError("no such thing")

    stream.data.load = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match="no such thing"):
        next(iter(stream))


def test_stream_of_documents_of_one_token_is_refused(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "pack_bins", lambda ends, length: [])
    with pytest.raises(TrainingError, match="nothing to predict"):
        open_stream(small).num_batches(0)
    with pytest.raises(TrainingError, match="nothing to predict"):
        next(iter(open_stream(small)))


def test_stream_passes_over_a_block_of_documents_of_one_token_in_every_epoch(
    small: SmallStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "_GROUP_BYTES", 2048)
    stream = open_stream(small)
    barren = stream.data.document_ends(stream.data.train_blocks[0]).tolist()
    pack_bins = stream_module.pack_bins
    monkeypatch.setattr(
        stream_module,
        "pack_bins",
        lambda ends, length: [] if ends.tolist() == barren else pack_bins(ends, length),
    )
    epochs = len(stream.data.train_blocks) + 2
    assert len(epoch_of(stream, epochs)) == stream.num_batches(epochs)


def test_orders_of_keys_that_end_in_zero_differ() -> None:
    """The order of blocks and that of the bins in the first group: one must not tell the other."""
    orders = {tuple(stream_module._shuffled(50, *key).tolist()) for key in [(5, 1), (5, 1, 0), (5, 0), (5, 0, 0), (5,)]}
    assert len(orders) == 5
