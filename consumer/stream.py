"""The order of training: which bins make up which global batch.

Blocks are shuffled by epoch and taken in groups; the bins of a group are shuffled and cut into batches of even size.
All of it is a function of (dataset, sequence length, seed, epoch, group), so the state is where one stands, and a
resumed run sees exactly what it would have seen.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from logitstore.consumer.batches import Batch, collate
from logitstore.consumer.bins import Bin, pack_bins
from logitstore.consumer.data import TrainingBlock, TrainingData
from logitstore.errors import ConfigError, TrainingError
from logitstore.storage import map_threads

_GROUP_BYTES = 16 << 20
"""Text that a group of blocks has: enough to mix documents well, little enough to keep decoded twice."""

_BLOCKS_AT_ONCE = 4
"""Blocks being read: a bucket answers many requests as fast as one, and decoding leaves the interpreter free."""

PlacedBin = tuple[TrainingBlock, Bin]


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """What the order of training depends on, besides the dataset."""

    sequence_length: int
    """Tokens of a packed sequence."""
    batch_tokens: int
    """Tokens of a global batch, padding included."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ConfigError(f"--seq-length {self.sequence_length}: expected at least one token")
        if self.batch_tokens < self.sequence_length:
            raise ConfigError(
                f"--batch-tokens {self.batch_tokens}: less than one sequence (--seq-length {self.sequence_length})"
            )

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.sequence_length


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands: the next batch is number ``batch`` of group ``group`` of epoch ``epoch``."""

    manifest: str
    config: StreamConfig
    epoch: int = 0
    group: int = 0
    batch: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StreamState:
        return cls(**{**data, "config": StreamConfig(**data["config"])})


class Stream:
    """Global batches without end, epoch after epoch."""

    def __init__(self, data: TrainingData, config: StreamConfig, temperature: float = 1.0) -> None:
        data.check_temperature(temperature)
        self.data, self.config, self.temperature = data, config, temperature
        self.state = StreamState(data.version.manifest.identity, config)
        self._group_blocks = max(1, _GROUP_BYTES // data.version.manifest.plan.settings.block_bytes)
        self._vocab_sizes = [teacher.known_ids(data.vocab_size) for teacher in data.teachers]
        self._num_bins: list[int] = []

    def resume(self, state: StreamState) -> None:
        """Continue where another stream of the same data and config stood.

        Raises:
            TrainingError: the dataset or the config differ.
        """
        if state.manifest != self.state.manifest:
            raise TrainingError(
                f"the run was trained on dataset {state.manifest[:16]}, which is now {self.state.manifest[:16]}: name "
                "the version it began with (--dataset-version), or begin a new run"
            )
        if state.config != self.state.config:
            raise TrainingError(f"the run reads its data with {state.config}, now {self.state.config} was asked for")
        self.state = state

    def __iter__(self) -> Iterator[list[PlacedBin]]:
        """Global batches, as bins. After taking one, ``state`` says where the next one starts."""
        return self.until(None)

    def until(self, end: int | None) -> Generator[list[PlacedBin], None, None]:
        """The same up to where epoch ``end`` begins, from wherever the stream stands; None: without end."""
        reader = ThreadPoolExecutor(_BLOCKS_AT_ONCE, thread_name_prefix="blocks")
        try:
            pending, num_fruitless = self._load_group(reader, self.state), 0
            while end is None or self.state.epoch < end:
                here, following = self.state, self._after_group(self.state)
                blocks = [future.result() for future in pending]
                pending = self._load_group(reader, following)
                batches = self._cut(blocks, here)
                for number in range(here.batch, len(batches)):
                    is_last = number + 1 == len(batches)
                    self.state = following if is_last else replace(here, batch=number + 1)
                    yield batches[number]
                num_fruitless = 0 if batches else num_fruitless + 1
                if not batches:  # documents of one token each
                    self.state = following
                    if num_fruitless > len(self.data.train_blocks):
                        raise self._nothing_to_predict()
        finally:
            # Whoever stops, for an error or at the end, does not wait for blocks that nobody will read.
            reader.shutdown(wait=False, cancel_futures=True)

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch. Reads where documents end, not the tokens: small objects, but one for every block.

        Raises:
            TrainingError: there is not one.
        """
        if not self._num_bins:
            for document_ends in map_threads(self.data.document_ends, self.data.train_blocks):
                self._num_bins.append(len(pack_bins(document_ends, self.config.sequence_length)))
        order = _shuffled(len(self._num_bins), self.config.seed, epoch)
        groups = [order[begin : begin + self._group_blocks] for begin in range(0, len(order), self._group_blocks)]
        sizes = [sum(self._num_bins[number] for number in group) for group in groups]
        if not any(sizes):
            raise self._nothing_to_predict()
        return sum(-(-size // self.config.batch_sequences) for size in sizes)

    def held_out(self, batch_sequences: int | None = None) -> Iterator[list[PlacedBin]]:
        """Held-out bins in the plan's order, once, so many at a time (a global batch by default)."""
        size = batch_sequences or self.config.batch_sequences
        for number in self.data.held_out_blocks:
            block = self.data.load(number)
            bins = [(block, bin_) for bin_ in pack_bins(block.tokens.ends, self.config.sequence_length)]
            for begin in range(0, len(bins), size):
                yield bins[begin : begin + size]

    def collate(self, bins: list[PlacedBin], temperature: float | None = None) -> Batch:
        """Tensors of a batch or of a slice of it, with rows for the stream's temperature or another."""
        return collate(bins, self.config.sequence_length, temperature or self.temperature, self._vocab_sizes)

    def _nothing_to_predict(self) -> TrainingError:
        return TrainingError(f"dataset {self.data.version.name!r}: no document has two tokens: nothing to predict")

    def _load_group(self, reader: ThreadPoolExecutor, state: StreamState) -> list[Future[TrainingBlock]]:
        order = _shuffled(len(self.data.train_blocks), self.config.seed, state.epoch)
        begin = state.group * self._group_blocks
        members = sorted(order[begin : begin + self._group_blocks].tolist())
        return [reader.submit(self.data.load, self.data.train_blocks[number]) for number in members]

    def _after_group(self, state: StreamState) -> StreamState:
        if (state.group + 1) * self._group_blocks < len(self.data.train_blocks):
            return replace(state, group=state.group + 1, batch=0)
        return replace(state, epoch=state.epoch + 1, group=0, batch=0)

    def _cut(self, blocks: list[TrainingBlock], state: StreamState) -> list[list[PlacedBin]]:
        bins = [(block, bin_) for block in blocks for bin_ in pack_bins(block.tokens.ends, self.config.sequence_length)]
        order = _shuffled(len(bins), self.config.seed, state.epoch, state.group)
        # As even as can be: a last batch of one sequence would weigh as much as a full one.
        num_batches = -(-len(bins) // self.config.batch_sequences)
        if num_batches == 0:
            return []
        return [[bins[n] for n in sorted(part.tolist())] for part in np.array_split(order, num_batches)]


def _shuffled(size: int, *key: int) -> np.ndarray:
    """A permutation of ``range(size)`` that is a function of ``key``."""
    # A seed sequence takes what is missing at its end for zeros: without its length, blocks and the bins of group 0
    # would be in one order.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([len(key), *key]))).permutation(size)
