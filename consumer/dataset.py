"""A dataset for a user's own loop: every rank's slices of the global batches, in one order whatever the topology.

One iteration step is one forward pass. The global batches are those of ``Stream``; each is cut into as many slices of
whole sequences as there are ranks times micro-batches, as even as can be. All ranks get the same number of slices, so
that their collectives meet: where there are fewer sequences than slices, some slices are padding that charges nothing.
Every slice knows the charged tokens of its global batch, which is what its loss is divided by.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from logitstore.consumer.batches import Batch, count_charged
from logitstore.consumer.data import TrainingData
from logitstore.consumer.stream import PlacedBin, Stream, StreamConfig, StreamState
from logitstore.errors import ConfigError, TrainingError
from logitstore.hub import load_tokenizer
from logitstore.store import Store
from logitstore.tokenizer import Tokenizer

_STATE_VERSION = 1


@dataclass(frozen=True)
class BatchSlice(Batch):
    """What one rank passes forward at once of a global batch.

    Attributes:
        num_charged_global: charged tokens of the whole global batch, on all ranks and in all micro-batches.
        num_ranks: how many ranks share the global batch.
        is_last: whether it is the rank's last slice of the global batch: time for an update.
        state: of the dataset once this slice is consumed, see ``LogitStoreDataset.state_dict``.
    """

    num_charged_global: int
    num_ranks: int
    is_last: bool
    state: dict[str, Any]

    @property
    def shift_labels(self) -> Tensor:
        """int64 [B, L]: the token that the output at each place predicts; -100 where none is charged."""
        labels = torch.full((self.input_ids.numel(),), -100, dtype=torch.int64, device=self.input_ids.device)
        labels[self.outputs] = self.targets
        return labels.view(self.input_ids.shape)


class LogitStoreDataset(IterableDataset[BatchSlice]):
    """Batches of a dataset in a store, for one student.

    It stands somewhere, as a file does: iterating goes on from there, ``state_dict`` says where that is, and
    ``load_state_dict`` puts it elsewhere without reading what lies before. Iterate over it, or over
    ``DataLoader(dataset, batch_size=None)``; with worker processes, too, the batches and their order are the same, but
    each worker reads all blocks and collates its share of the slices (blocks are read in threads in any case).
    """

    def __init__(
        self,
        store: str | Path,
        dataset: str,
        *,
        tokenizer: str | Path | Tokenizer | Any,
        seq_length: int = 1024,
        batch_tokens: int = 16384,
        micro_batch_tokens: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        loss_on: str = "all",
        teacher_weights: Mapping[str, float] | None = None,
        selection: str | None = None,
        projected: bool | None = None,
        version: int | None = None,
        pin: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Open the store and find what the student needs.

        Args:
            store: path or any fsspec URL.
            dataset: its name.
            tokenizer: the student's: folder, hub id, a ``Tokenizer`` of logitstore, or a fast one of transformers.
            seq_length: input tokens of a packed sequence.
            batch_tokens: tokens of a global batch, padding included, on all ranks together.
            micro_batch_tokens: of one forward pass of one rank; its whole slice by default.
            epochs: passes over the training blocks, then iteration ends; without end by default.
            seed: of the order.
            temperature: of the objective; decides which stored mass outside the teachers' rows is read.
            loss_on: ``all`` tokens, or ``answers``: completions and assistant turns.
            teacher_weights: by teacher name; all with equal weight by default, ``{}``: none is read.
            selection: where a teacher has several signals: ``topk``, ``topk:64``, ``threshold``.
            projected: False: take teachers' rows over their own tokens even where they were projected to the
                student's vocabulary; some terms and any temperature but 1 need that.
            version: of the dataset; the newest by default.
            pin: the manifest digest that it must have, or its beginning.
            rank: of this process; torch.distributed's, else that of the environment variable RANK, else 0.
            world_size: how many ranks there are; likewise, WORLD_SIZE and 1.

        Raises:
            ConfigError: lengths, temperature, teachers or ranks that do not work.
            TrainingError: the dataset lacks this student's tokens, their alignment or any teacher.
            StoreError: no such store, dataset or version.
        """
        self.url, self.name, self.temperature = str(store), dataset, temperature
        self.tokenizer = _tokenizer(tokenizer)
        self.epochs, self.micro_batch_tokens = epochs, micro_batch_tokens
        self._rank, self._world_size = rank, world_size
        self._config = StreamConfig(sequence_length=seq_length, batch_tokens=batch_tokens, seed=seed)
        self._reading = {
            "teacher_weights": teacher_weights,
            "selection": selection,
            "projected": projected if temperature == 1.0 else False,
            "loss_on": loss_on,
        }
        self._version, self._pin = version, pin
        self._micro_batches: int | None = None
        self._check()
        self._stream = self._open()
        self._pid = os.getpid()
        self._version = self._stream.data.version.number  # for workers: by then there may be a newer one
        self._state = self._stream.state

    @property
    def stream(self) -> Stream:
        """Global batches as bins, and held-out ones; it stands at the beginning."""
        if self._pid != os.getpid():  # connections do not survive a fork
            self._stream, self._pid = self._open(), os.getpid()
        return self._stream

    @property
    def world_size(self) -> int:
        return self._place("world_size", self._world_size, 1)

    @property
    def rank(self) -> int:
        return self._place("rank", self._rank, 0)

    @property
    def micro_batches(self) -> int:
        """Slices of each global batch that one rank gets, one after the other."""
        if self._micro_batches is not None:
            return self._micro_batches
        if self.micro_batch_tokens is None:
            return 1
        of_rank = -(-self._config.batch_sequences // self.world_size)
        return -(-of_rank // (self.micro_batch_tokens // self._config.sequence_length))

    def __len__(self) -> int:
        """Slices that one rank gets in all epochs. Reads where documents end: a small object for every block."""
        if self.epochs is None:
            raise TypeError("a LogitStoreDataset without epochs= has no end, so no length")
        return self.micro_batches * sum(self.num_batches(epoch) for epoch in range(self.epochs))

    def num_batches(self, epoch: int) -> int:
        """Global batches of an epoch; epochs may differ by a few, since blocks are grouped anew."""
        return self.stream.num_batches(epoch)

    def __iter__(self) -> Iterator[BatchSlice]:
        """This rank's slices from where the dataset stands; from then on it stands behind what was handed out.

        Raises:
            TrainingError: all epochs are over.
        """
        if self.epochs is not None and self._state.epoch >= self.epochs:
            raise TrainingError(
                f"dataset {self.name!r}: its {self.epochs} epochs are over; make it with more epochs= and iterate "
                "once, or load the state to begin from"
            )
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with closing(self._slices()) as slices:
            for index, (own, other, known) in enumerate(slices):
                # A DataLoader takes from its workers in turn, which puts the slices in order again.
                if index % num_workers == number:
                    found = self._collate(own, other, known)
                    self.advance(found)
                    yield found

    def advance(self, batch: BatchSlice) -> None:
        """Stand behind ``batch``: for batches that worker processes read. ``DistillationLoss`` does it by itself."""
        self._state = _state_of(batch.state)

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset stands, JSON-able, the same on all ranks. Begun global batches count as not begun."""
        return _state_dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where ``state`` was taken; the number of ranks and micro-batches may be another.

        Raises:
            TrainingError: it is of other data, of another order, or of a newer logitstore.
        """
        stream = self._new_stream()
        stream.resume(_state_of(state))
        self._state = stream.state

    def endless(self, micro_batches: int) -> LogitStoreDataset:
        """The same without end, standing at the same place, with so many slices of a global batch for each rank."""
        found = copy.copy(self)
        found.epochs, found._micro_batches = None, micro_batches
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they open the store anew, and know no process group."""
        tokenizer = (self.tokenizer.asset(), self.tokenizer.rendering(), self.tokenizer.template_asset())
        fixed = {"_stream": None, "_pid": -1, "_rank": self.rank, "_world_size": self.world_size}
        return {**self.__dict__, **fixed, "tokenizer": tokenizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tokenizer=Tokenizer.from_asset(*state["tokenizer"]))

    def __copy__(self) -> LogitStoreDataset:
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def _slices(self) -> Generator[tuple[list[PlacedBin], PlacedBin, dict[str, Any]], None, None]:
        """Bins of this rank's slices, a bin to go forward with if there is none, and what ``BatchSlice`` adds."""
        rank, num_ranks, micro_batches = self.rank, self.world_size, self.micro_batches
        stream = self._new_stream()
        stream.resume(self._state)
        before = stream.state
        with closing(stream.until(self.epochs)) as batches:
            for bins in batches:
                known = {"num_charged_global": count_charged(bins), "num_ranks": num_ranks}
                for number in range(micro_batches):
                    is_last = number + 1 == micro_batches
                    state = _state_dict(stream.state if is_last else before)
                    own = _part(_part(bins, rank, num_ranks), number, micro_batches)
                    yield own, bins[0], {**known, "is_last": is_last, "state": state}
                before = stream.state

    def _collate(self, own: list[PlacedBin], other: PlacedBin, known: dict[str, Any]) -> BatchSlice:
        # Without a sequence of its own, a rank must go forward and back with the others all the same.
        batch = self.stream.collate(own) if own else replace(self.stream.collate([_uncharged(other)]), num_tokens=0)
        return BatchSlice(**{field.name: getattr(batch, field.name) for field in fields(Batch)}, **known)

    def _open(self) -> Stream:
        store = Store.open(self.url)
        version = store.dataset(self.name, self._version, pin=self._pin)
        data = TrainingData.open(store, version, self.tokenizer, **self._reading)  # type: ignore[arg-type]
        return Stream(data, self._config, self.temperature)

    def _new_stream(self) -> Stream:
        """One of its own for each iteration: a stream is moved by whoever iterates."""
        return Stream(self.stream.data, self._config, self.temperature)

    def _check(self) -> None:
        length, micro = self._config.sequence_length, self.micro_batch_tokens
        if micro is not None and micro < length:
            raise ConfigError(f"micro_batch_tokens={micro}: less than one sequence (seq_length={length})")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs}: expected at least 1, or None for no end")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank={self.rank} of world_size={self.world_size}: expected 0 to world_size - 1; give both, or neither"
            )

    def _place(self, name: str, given: int | None, default: int) -> int:
        """Looked up when it is needed: a process group may be made after the dataset."""
        if given is not None:
            return given
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank() if name == "rank" else dist.get_world_size()
        return int(os.environ.get(name.upper(), default))


def _tokenizer(given: Any) -> Tokenizer:
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | Path):
        return load_tokenizer(str(given))
    return Tokenizer.from_loaded(given)


def _part(bins: list[PlacedBin], number: int, of: int) -> list[PlacedBin]:
    """Part ``number`` of ``of`` parts whose sizes differ by one at most."""
    return bins[len(bins) * number // of : len(bins) * (number + 1) // of]


def _uncharged(placed: PlacedBin) -> PlacedBin:
    """A bin whose loss is 0."""
    block, pieces = placed
    return replace(block, charged=block.charged & False), pieces


def _state_dict(state: StreamState) -> dict[str, Any]:
    return {"version": _STATE_VERSION, **state.to_json()}


def _state_of(found: Mapping[str, Any]) -> StreamState:
    values = dict(found)
    version = values.pop("version", None)
    if version != _STATE_VERSION:
        raise TrainingError(
            f"a dataset's state of version {version}: expected {_STATE_VERSION}, as state_dict() of this logitstore "
            "writes it; load it with the logitstore that wrote it, or begin anew"
        )
    return StreamState.from_json(values)
