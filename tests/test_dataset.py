"""The dataset of a user's own loop: the stream's batches, whole, in order, once, however many share them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from small_store import SEQUENCE_LENGTH, SmallStore, open_stream
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from logitstore.consumer import stream as stream_module
from logitstore.consumer.batches import Batch
from logitstore.consumer.data import TrainingData
from logitstore.consumer.dataset import BatchSlice, LogitStoreDataset
from logitstore.errors import ConfigError, TrainingError
from logitstore.tokenizer import Tokenizer


def make_dataset(small: SmallStore, *, sequences: int = 3, **options: Any) -> LogitStoreDataset:
    options = {"tokenizer": small.tokenizer, "selection": "topk", "seq_length": SEQUENCE_LENGTH, **options}
    return LogitStoreDataset(small.url, "mixed", batch_tokens=SEQUENCE_LENGTH * sequences, **options)


def contents(batches: list[Any]) -> list[list[int]]:
    return [[*batch.input_ids.flatten().tolist(), -7, *batch.targets.tolist()] for batch in batches]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_GROUP_BYTES", 2 * 2048)


@pytest.mark.parametrize("micro_batch_tokens", [None, SEQUENCE_LENGTH, 2 * SEQUENCE_LENGTH])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_slices_of_all_ranks_are_the_global_batch(
    small: SmallStore, small_groups: None, world_size: int, micro_batch_tokens: int | None
) -> None:
    sequences, num_batches = 5, 6
    stream = open_stream(small, sequences=sequences)
    batches = [stream.collate(bins) for bins in islice(iter(stream), num_batches)]
    options = {"micro_batch_tokens": micro_batch_tokens, "world_size": world_size}
    ranks = [make_dataset(small, sequences=sequences, rank=rank, **options) for rank in range(world_size)]
    count = ranks[0].micro_batches
    slices = [list(islice(rank, num_batches * count)) for rank in ranks]
    for number, batch in enumerate(batches):
        parts = [part for own in slices for part in own[number * count : (number + 1) * count]]
        assert {part.num_charged_global for part in parts} == {batch.num_charged}
        assert torch.cat([part.targets for part in parts]).equal(batch.targets)
        assert torch.cat([part.input_ids for part in parts if part.num_tokens]).equal(batch.input_ids)
        assert sum(part.num_tokens for part in parts) == batch.num_tokens
        assert [part.is_last for part in parts] == [n == count - 1 for n in range(count)] * world_size
        sizes = [len(part.input_ids) for part in parts]
        assert max(sizes) <= (micro_batch_tokens or SEQUENCE_LENGTH * sequences) // SEQUENCE_LENGTH
        for part in parts:
            assert bool(part.num_tokens) == bool(part.num_charged)


def test_finite_dataset_has_its_length_and_charges_every_token_once_an_epoch(
    small: SmallStore, small_groups: None
) -> None:
    dataset = make_dataset(small, epochs=2, micro_batch_tokens=SEQUENCE_LENGTH, world_size=2, rank=1)
    other = make_dataset(small, epochs=2, micro_batch_tokens=SEQUENCE_LENGTH, world_size=2, rank=0)
    found = list(dataset)
    assert len(found) == len(dataset) == len(list(other))
    counts = [batch.num_charged_global for batch in found if batch.is_last]
    data = dataset.stream.data
    assert sum(counts) == 2 * sum(int(data.load(block).charged.sum()) for block in data.train_blocks)


def test_iterating_goes_on_and_ends_with_the_epochs(small: SmallStore) -> None:
    whole = contents(list(make_dataset(small, epochs=1)))
    dataset = make_dataset(small, epochs=1)
    first = contents(list(islice(dataset, 2)))
    assert first + contents(list(dataset)) == whole
    with pytest.raises(TrainingError, match="its 1 epochs are over; make it with more epochs="):
        next(iter(dataset))


def test_dataset_without_end_has_no_length(small: SmallStore) -> None:
    with pytest.raises(TypeError, match="no length"):
        len(make_dataset(small))


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_resumed_dataset_gives_exactly_the_rest_on_other_ranks(
    small: SmallStore, small_groups: None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(islice(make_dataset(small), 12))
    dataset = make_dataset(small, world_size=2, rank=0)
    for _ in islice(dataset, taken):
        pass
    state = json.loads(json.dumps(dataset.state_dict()))
    loaded: list[int] = []
    load = TrainingData.load
    monkeypatch.setattr(TrainingData, "load", lambda data, block: loaded.append(block) or load(data, block))
    ranks = [make_dataset(small, world_size=3, rank=rank) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    first = [next(iter(rank)) for rank in ranks]
    assert torch.cat([part.targets for part in first]).equal(whole[taken].targets)
    assert len(loaded) <= 3 * 4  # two groups a rank, whatever was taken before


def test_state_within_a_global_batch_is_that_of_its_beginning(small: SmallStore) -> None:
    dataset = make_dataset(small, micro_batch_tokens=SEQUENCE_LENGTH)
    states = [dataset.state_dict()]
    for batch in islice(dataset, 7):
        assert dataset.state_dict() == batch.state
        states.append(batch.state)
    assert states[0] == states[1] == states[2] != states[3] == states[4] == states[5] != states[6]


def test_state_of_other_data_order_or_version_is_refused(small: SmallStore) -> None:
    dataset = make_dataset(small)
    state = dataset.state_dict()
    with pytest.raises(TrainingError, match="--dataset-version"):
        dataset.load_state_dict({**state, "manifest": "0" * 64})
    with pytest.raises(TrainingError, match="seed=1"):
        dataset.load_state_dict(make_dataset(small, seed=1).state_dict())
    with pytest.raises(TrainingError, match="state of version 2: expected 1"):
        dataset.load_state_dict({**state, "version": 2})
    assert dataset.state_dict() == state


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_loader_gives_every_batch_once_in_order_with_any_number_of_workers(
    small: SmallStore, small_groups: None, num_workers: int
) -> None:
    expected = contents(list(make_dataset(small, epochs=1, micro_batch_tokens=2 * SEQUENCE_LENGTH)))
    dataset = make_dataset(small, epochs=1, micro_batch_tokens=2 * SEQUENCE_LENGTH)
    found = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert contents(found) == expected
    assert all(isinstance(batch, BatchSlice) for batch in found)
    dataset.advance(found[3])
    assert contents(list(dataset)) == expected[4:]


def test_spawned_workers_know_the_rank_of_their_process(small: SmallStore) -> None:
    dataset = make_dataset(small, world_size=2, rank=1)
    expected = contents(list(islice(dataset, 2)))
    again = make_dataset(small, world_size=2, rank=1)
    loader = DataLoader(again, batch_size=None, num_workers=1, multiprocessing_context="spawn", prefetch_factor=1)
    assert contents(list(islice(loader, 2))) == expected
    assert pickle.loads(pickle.dumps(again)).rank == 1


def test_batches_can_be_pickled_and_hold_their_parts(small: SmallStore) -> None:
    batch = next(iter(make_dataset(small)))
    again = pickle.loads(pickle.dumps(batch))
    assert again.state == batch.state
    assert again.teachers[0].rows.ids_NK.equal(batch.teachers[0].rows.ids_NK)
    there = batch.to("meta")
    assert isinstance(there, BatchSlice)
    assert there.teachers[0].spans.logprob.device.type == there.teachers[1].rows.log_masses_NK.device.type == "meta"
    assert there.num_charged_global == batch.num_charged_global


def test_tokenizer_may_be_a_folder_ours_or_one_of_transformers(small: SmallStore) -> None:
    ours = Tokenizer.from_folder(small.tokenizer)
    theirs = PreTrainedTokenizerFast.from_pretrained(small.tokenizer)
    batches = [next(iter(make_dataset(small, tokenizer=each))) for each in (small.tokenizer, ours, theirs)]
    assert contents(batches[1:2]) == contents(batches[2:]) == contents(batches[:1])


def test_leaving_the_loop_ends_the_reading_threads(small: SmallStore) -> None:
    for _ in make_dataset(small):
        break
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("blocks") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rank_is_that_of_the_environment_unless_given(small: SmallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (make_dataset(small).rank, make_dataset(small).world_size) == (2, 4)
    assert make_dataset(small, rank=0, world_size=1).world_size == 1
    with pytest.raises(ConfigError, match="rank=2 of world_size=2"):
        make_dataset(small, world_size=2)


def test_impossible_options_are_refused(small: SmallStore) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens=63: less than one sequence"):
        make_dataset(small, micro_batch_tokens=63)
    with pytest.raises(ConfigError, match="epochs=0"):
        make_dataset(small, epochs=0)
    with pytest.raises(ConfigError, match="--temperature 3"):
        make_dataset(small, temperature=3.0)
    with pytest.raises(TrainingError, match="logitstore align"):
        make_dataset(small, tokenizer=small.stranger)


def test_options_of_reading_are_those_of_the_command(small: SmallStore) -> None:
    options = {"temperature": 2.0, "loss_on": "answers", "seed": 3, "teacher_weights": {"big": 1.0}}
    stream = open_stream(small, sequences=3, **options)
    expected: Batch = stream.collate(next(iter(stream)))
    found = next(iter(make_dataset(small, **options)))
    assert contents([found]) == contents([expected])
    assert len(found.teachers) == 1
    assert found.teachers[0].rows.log_masses_NK.equal(expected.teachers[0].rows.log_masses_NK)


def test_shift_labels_are_the_targets_where_they_are_predicted(small: SmallStore) -> None:
    batch = next(iter(make_dataset(small, loss_on="answers")))
    labels = batch.shift_labels
    assert (labels != -100).sum() == batch.num_charged > 0
    assert labels.flatten()[batch.outputs].equal(batch.targets)
    # Within a document, what an output predicts is the next input.
    inside = batch.position_ids[:, 1:] > 0
    charged = (labels[:, :-1] != -100) & inside
    assert labels[:, :-1][charged].equal(batch.input_ids[:, 1:][charged])
    assert (replace(batch, outputs=batch.outputs[:0], targets=batch.targets[:0]).shift_labels == -100).all()


def test_importing_the_consumer_imports_no_torch() -> None:
    code = (
        "import sys, logitstore.consumer as c; assert 'torch' not in sys.modules; c.parse_objective; "
        "assert 'torch' not in sys.modules; assert 'LogitStoreDataset' in dir(c); c.LogitStoreDataset; "
        "assert 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).stderr == b""
    with pytest.raises(ImportError, match="cannot import name"):
        from logitstore.consumer import Nothing  # type: ignore[attr-defined]  # noqa: F401
