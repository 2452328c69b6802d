"""The training loop, from top to bottom.

A step takes one global batch, accumulates gradients over its slices with one denominator (the charged tokens of the
whole batch), clips, and updates. Everything that a step depends on is in the checkpoint, so a resumed run repeats it
bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.batches import Batch
from logitstore.consumer.checkpoint import Progress, load_checkpoint, save_checkpoint
from logitstore.consumer.evaluation import evaluate
from logitstore.consumer.metrics import Metrics
from logitstore.consumer.objectives import Objective
from logitstore.consumer.schedules import learning_rate_factor
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.student import Student
from logitstore.errors import ConfigError, TrainingError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How a student is optimised. The names are those of the options of ``logitstore train``."""

    max_steps: int | None = None
    """Updates in all, through as many epochs as that takes; by default those that ``epochs`` take."""
    epochs: int = 1
    micro_batch_tokens: int | None = None
    """Tokens of one forward pass; the whole batch by default. Changes speed and memory, not the result's meaning."""
    lr: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    temperature: float = 1.0
    bf16: bool = False
    """Forward and backward in bfloat16, weights and updates in float32."""
    log_every: int = 10
    evaluate_every: int = 0
    """Updates between held-out measures; 0: at the end only."""
    save_every: int = 200
    """Updates between checkpoints."""


class TrainProgress(Protocol):
    """Who wants to know how far a run is."""

    def begin(self, step: int, total_steps: int) -> None: ...
    def advance(self, step: int, num_tokens: int, loss: float) -> None:
        """A step was made, on ``num_tokens`` input tokens."""


@dataclass(frozen=True)
class TrainReport:
    """What a run came to. ``held_out`` is empty if nothing is held out."""

    step: int
    num_tokens: int
    seconds: float
    held_out: dict[str, float]


class Trainer:
    """One run."""

    def __init__(
        self,
        student: Student,
        stream: Stream,
        objective: Objective,
        config: TrainerConfig,
        folder: Path,
        device: str,
        progress: TrainProgress,
    ) -> None:
        self.student, self.stream, self.config = student, stream, config
        self.folder, self.device, self.progress = folder, device, progress
        self._slice_sequences = _slice_sequences(config, stream)
        student.check_length(stream.config.sequence_length)
        student.model.to(device).train()  # type: ignore[arg-type]
        self.loss = BatchLoss(objective, stream.data.teachers, config.temperature, student)
        self.optimizer = torch.optim.AdamW(
            _decay_groups(student.model, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        torch.manual_seed(stream.config.seed)  # of dropout, where the student has any
        self.step, self.num_tokens = 0, 0
        self.total_steps = config.max_steps or sum(stream.num_batches(epoch) for epoch in range(config.epochs))
        self._stop_requested = False

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same data and batches."""
        progress = load_checkpoint(checkpoint, self.student.model, self.optimizer)
        self.stream.resume(progress.stream)
        self.step, self.num_tokens = progress.step, progress.num_tokens

    def request_stop(self) -> None:
        """Let ``run`` end after the step that it is at, with a checkpoint; may be called from a signal handler."""
        self._stop_requested = True

    def run(self) -> TrainReport:
        """Train to the end, measure, and save the student. A run that is at its end already is measured again.

        Raises:
            TrainingError: the loss is no longer a number.
            StorageError: the disk is full, say; the older checkpoints are whole.
            KeyboardInterrupt: a stop was requested, and a checkpoint written.
        """
        began, tokens_before = time.monotonic(), self.num_tokens
        self.progress.begin(self.step, self.total_steps)
        if self.step < self.total_steps:
            with closing(Metrics(self.folder, self.step)) as metrics:
                held_out = self._train(metrics)
        else:
            held_out = self._evaluate()
        seconds = time.monotonic() - began
        self.student.save(self.folder)
        return TrainReport(self.step, self.num_tokens - tokens_before, seconds, held_out)

    def save(self) -> Path:
        """Write a checkpoint of where the run is."""
        progress = Progress(self.step, self.num_tokens, self.stream.state)
        return save_checkpoint(self.folder / "checkpoints", self.student.model, self.optimizer, progress)

    def _train(self, metrics: Metrics) -> dict[str, float]:
        """Step to the end; returns the last held-out measures.

        All records of a step are written before its checkpoint: whoever resumes from that need not write them again.
        """
        config, window_began, window_tokens = self.config, time.monotonic(), self.num_tokens
        for bins in self.stream:
            values = self._update(bins)
            is_last = self.step == self.total_steps
            if is_last or self.step % config.log_every == 0:
                seconds = time.monotonic() - window_began
                values["tokens_per_s"] = (self.num_tokens - window_tokens) / max(seconds, 1e-9)
                metrics.write(self.step, "train", {**values, "num_tokens": self.num_tokens})
                window_began, window_tokens = time.monotonic(), self.num_tokens
            if is_last or (config.evaluate_every and self.step % config.evaluate_every == 0):
                held_out = self._evaluate()
                metrics.write(self.step, "held_out", held_out)
                window_began, window_tokens = time.monotonic(), self.num_tokens
            if is_last or self._stop_requested or self.step % config.save_every == 0:
                self.save()
            if is_last:
                return held_out
            if self._stop_requested:
                raise KeyboardInterrupt
        raise AssertionError("a stream has no end")

    def _update(self, bins: list[PlacedBin]) -> dict[str, float]:
        """One step; returns means over its charged tokens."""
        rate = self.config.lr * learning_rate_factor(
            self.config.schedule, self.step, self.total_steps, self.config.warmup_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        slices = [self.stream.collate(part) for part in self._slices(bins)]
        num_charged = max(1, sum(batch.num_charged for batch in slices))
        sums = self._accumulate(slices, num_charged)
        values = {name: value.item() / num_charged for name, value in sums.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), self.config.clip or float("inf")).item()
        if not (abs(values["loss"]) < float("inf") and norm < float("inf")):
            raise TrainingError(
                f"step {self.step + 1}: loss {values['loss']}, gradient norm {norm}: training diverged; go on from the "
                "last checkpoint with a smaller --lr and --resume, or begin again"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        num_tokens = sum(batch.num_tokens for batch in slices)
        self.step, self.num_tokens = self.step + 1, self.num_tokens + num_tokens
        self.progress.advance(self.step, num_tokens, values["loss"])
        return {**values, "grad_norm": norm, "lr": rate}

    def _accumulate(self, slices: list[Batch], num_charged: int) -> dict[str, torch.Tensor]:
        """Gradients of the mean over all slices; returns the sums."""
        sums: dict[str, torch.Tensor] = {}
        try:
            for batch in slices:
                with self._autocast():
                    found = self.loss(self.student, batch.to(self.device))
                (found.total / num_charged).backward()
                for name, value in {"loss": found.total.detach(), **found.terms}.items():
                    sums[name] = sums[name] + value if name in sums else value
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"step {self.step + 1}: out of memory on {self.device}: set --micro-batch-tokens lower (at least "
                f"--seq-length, {self.stream.config.sequence_length}); the result stays the same"
            ) from error
        return sums

    def _slices(self, bins: list[PlacedBin]) -> Iterator[list[PlacedBin]]:
        for begin in range(0, len(bins), self._slice_sequences):
            yield bins[begin : begin + self._slice_sequences]

    def _evaluate(self) -> dict[str, float]:
        with self._autocast():
            return evaluate(self.student, self.stream, self.device, self._slice_sequences)

    def _autocast(self) -> AbstractContextManager[None]:
        if not self.config.bf16:
            return nullcontext()
        return torch.autocast(self.device.split(":")[0], torch.bfloat16)


def _slice_sequences(config: TrainerConfig, stream: Stream) -> int:
    """Sequences of one forward pass."""
    length, tokens = stream.config.sequence_length, config.micro_batch_tokens
    if tokens is not None and tokens < length:
        raise ConfigError(f"--micro-batch-tokens {tokens}: less than one sequence (--seq-length {length})")
    return (tokens or stream.config.batch_tokens) // length


def _decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: gains and biases have no business near zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
