"""The training loop, from top to bottom.

A step takes one global batch, accumulates gradients over its slices with one denominator (the charged tokens of the
whole batch), clips, and updates. Everything that a step depends on is in the checkpoint, so a resumed run repeats it
bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from logitstore.consumer.checkpoint import Progress, load_checkpoint, save_checkpoint
from logitstore.consumer.evaluation import evaluate
from logitstore.consumer.loss import DistillationLoss
from logitstore.consumer.metrics import Metrics
from logitstore.consumer.objectives import Objective
from logitstore.consumer.schedules import learning_rate_factor
from logitstore.consumer.stream import PlacedBin, Stream
from logitstore.consumer.student import Student
from logitstore.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How a student is optimised. The names are those of the options of ``logitstore train``."""

    max_steps: int | None = None
    """Updates in all; as many as ``epochs`` take by default."""
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
    def advance(self, step: int, num_tokens: int, loss: float) -> None: ...


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
        student.model.to(device).train()  # type: ignore[arg-type]
        self.loss = DistillationLoss(objective, stream.data.teachers, config.temperature, student)
        self.optimizer = torch.optim.AdamW(
            _decay_groups(student.model, config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )
        self.step, self.num_tokens = 0, 0
        self.total_steps = config.max_steps or self._steps_of_epochs()

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of the same data and batches."""
        progress = load_checkpoint(checkpoint, self.student.model, self.optimizer)
        self.stream.resume(progress.stream)
        self.step, self.num_tokens = progress.step, progress.num_tokens

    def run(self) -> TrainReport:
        """Train to the end, measure, and save the student.

        Raises:
            TrainingError: the loss is no longer a number.
        """
        began, tokens_before = time.monotonic(), self.num_tokens
        metrics = Metrics(self.folder, self.step)
        self.progress.begin(self.step, self.total_steps)
        try:
            if self.step < self.total_steps:
                self._train(metrics)
            seconds = time.monotonic() - began
            held_out = self._evaluate(metrics)
        finally:
            metrics.close()
        self.student.save(self.folder)
        return TrainReport(self.step, self.num_tokens - tokens_before, seconds, held_out)

    def save(self) -> Path:
        """Write a checkpoint of where the run is."""
        progress = Progress(self.step, self.num_tokens, self.stream.state)
        return save_checkpoint(self.folder / "checkpoints", self.student.model, self.optimizer, progress)

    def _train(self, metrics: Metrics) -> None:
        config, window_began, window_tokens = self.config, time.monotonic(), self.num_tokens
        for bins in self.stream:
            values = self._update(bins)
            self.progress.advance(self.step, self.num_tokens, values["loss"])
            if self.step % config.log_every == 0 or self.step == self.total_steps:
                seconds = time.monotonic() - window_began
                values["tokens_per_s"] = (self.num_tokens - window_tokens) / max(seconds, 1e-9)
                metrics.write(self.step, "train", {**values, "num_tokens": self.num_tokens})
                window_began, window_tokens = time.monotonic(), self.num_tokens
            if self.step == self.total_steps or self.step % config.save_every == 0:
                self.save()
            if self.step == self.total_steps:
                return
            if config.evaluate_every and self.step % config.evaluate_every == 0:
                self._evaluate(metrics)
                window_began, window_tokens = time.monotonic(), self.num_tokens

    def _update(self, bins: list[PlacedBin]) -> dict[str, float]:
        """One step; returns means over its charged tokens."""
        rate = self.config.lr * learning_rate_factor(
            self.config.schedule, self.step, self.total_steps, self.config.warmup_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        slices = [self.stream.collate(part) for part in self._slices(bins)]
        num_charged = max(1, sum(batch.num_charged for batch in slices))
        sums: dict[str, torch.Tensor] = {}
        for batch in slices:
            with self._autocast():
                found = self.loss(self.student, batch.to(self.device))
            (found.total / num_charged).backward()
            for name, value in {"loss": found.total.detach(), **found.terms}.items():
                sums[name] = sums[name] + value if name in sums else value
            self.num_tokens += batch.num_tokens
        values = {name: value.item() / num_charged for name, value in sums.items()}
        norm = torch.nn.utils.clip_grad_norm_(self.student.model.parameters(), self.config.clip or float("inf")).item()
        if not (abs(values["loss"]) < float("inf") and norm < float("inf")):
            raise TrainingError(
                f"step {self.step + 1}: loss {values['loss']}, gradient norm {norm}: training diverged; resume from "
                "the last checkpoint with a smaller --lr"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {**values, "grad_norm": norm, "lr": rate}

    def _slices(self, bins: list[PlacedBin]) -> Iterator[list[PlacedBin]]:
        length = self.stream.config.sequence_length
        size = max(1, (self.config.micro_batch_tokens or self.stream.config.batch_tokens) // length)
        for begin in range(0, len(bins), size):
            yield bins[begin : begin + size]

    def _evaluate(self, metrics: Metrics) -> dict[str, float]:
        with self._autocast():
            values = evaluate(self.student, self.stream, self.device)
        if values:
            metrics.write(self.step, "held_out", values)
        return values

    def _autocast(self) -> AbstractContextManager[None]:
        if not self.config.bf16:
            return nullcontext()
        return torch.autocast(self.device.split(":")[0], torch.bfloat16)

    def _steps_of_epochs(self) -> int:
        """An estimate from the tokens of the dataset: packing leaves little of a sequence empty."""
        return max(1, round(self.config.epochs * self.stream.data.num_train_tokens / self.stream.config.batch_tokens))


def _decay_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: gains and biases have no business near zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
