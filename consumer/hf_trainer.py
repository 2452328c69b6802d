"""Distillation in a Hugging Face ``Trainer``: ``class DistillationTrainer(DistillationMixin, Trainer): ...``

The Trainer keeps its loop, optimizer, schedule, logs and checkpoints. What it would get wrong for a stream of packed
batches is taken over here:

- data: accelerate would have rank 0 read for all, or every rank read everything, and the Trainer would drop columns
  that no model knows. The dataset cuts its own slices, so its loader is not prepared.
- loss: a step is one global batch, cut into ``gradient_accumulation_steps`` slices. Slices carry the global count, so
  nothing is left to divide; DDP's mean over ranks is undone.
- wrappers: the model's forward computes the loss when it is told to, so it is the wrapper's own forward that runs.
- resuming: the stream's position is in the checkpoint's ``trainer_state.json``; nothing is read again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from logitstore.consumer.dataset import BatchSlice, LogitStoreDataset
from logitstore.consumer.distillation_loss import DistillationLoss
from logitstore.consumer.objectives import Objective
from logitstore.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

_STATE = "logitstore"
"""Where the stream's position stands among ``stateful_callbacks`` of ``trainer_state.json``."""
_BATCH = "batch_slice"


class DistillationMixin(_Base):
    """Goes before ``Trainer`` among the bases."""

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        *,
        distillation_dataset: LogitStoreDataset | None = None,
        train_dataset: LogitStoreDataset | None = None,
        eval_dataset: Any = None,
        objective: str | Objective = "kl:0.9,ce:0.1",
        **options: Any,
    ) -> None:
        """As ``Trainer``, with a dataset of logitstore.

        ``per_device_train_batch_size`` does not matter: the dataset's ``batch_tokens`` are those of an update, on all
        ranks and in all accumulation steps. Without ``max_steps``, training takes the dataset's ``epochs``, or
        ``num_train_epochs`` of a dataset without end.

        Args:
            model: not wrapped.
            args: are copied.
            distillation_dataset: or ``train_dataset``, which is the same.
            train_dataset: see there.
            eval_dataset: whose held-out blocks ``evaluate`` measures; by default the training dataset's. Others are
                left to ``Trainer``.
            objective: terms with weights.
            options: the Trainer's.

        Raises:
            ConfigError: arguments that would change the loss, or that this cannot serve.
            ModelError: the model cannot be trained so, see ``DistillationLoss``.
        """
        dataset = distillation_dataset if distillation_dataset is not None else train_dataset
        if not isinstance(dataset, LogitStoreDataset):
            raise ConfigError(f"train_dataset: got a {type(dataset).__name__}, expected a LogitStoreDataset")
        args = copy.copy(args) if args is not None else TrainingArguments(output_dir="tmp_trainer")
        _check_arguments(args, options)
        _set_arguments(args, dataset)
        self.source = dataset.endless(args.gradient_accumulation_steps)
        held_out = dataset if eval_dataset is None else eval_dataset
        super().__init__(model=model, args=args, train_dataset=dataset, eval_dataset=held_out, **options)
        _check_topology(self, dataset)
        student: Any = self.model
        self.distillation_loss = DistillationLoss(student, dataset, objective=objective)
        _let_forward_compute(student)
        self.add_callback(_StreamPosition(self.source))
        # Both say that the loss is not to be divided by the accumulation steps; the second to older versions.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> DataLoader:
        """Not prepared by accelerate: every rank reads its own slices."""
        args, as_inputs = self.args, cast(Any, model_inputs)  # of one sample, where there is no batch size
        return _EpochLoader(
            self.source,
            batch_size=None,
            collate_fn=as_inputs,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            # Its own, or the beginning of an epoch would draw from the numbers that dropout has, and a resumed run
            # would begin once more.
            generator=torch.Generator(),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """All slices of one global batch."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if samples and _BATCH in samples[-1]:
            assert samples[-1][_BATCH].is_last
            assert len(samples) == num_batches
            self.source.advance(samples[-1][_BATCH])
        return samples, num_items

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Any:
        """Charged tokens of the global batch: on all ranks, whose own labels need not be counted."""
        if not batch_samples or _BATCH not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        return torch.tensor(batch_samples[0][_BATCH].num_charged_global, device=device)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The slice's share of the global batch's mean, times the ranks that gradients are averaged over."""
        if _BATCH not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch: BatchSlice = inputs[_BATCH]
        loss = model(distillation=partial(self.distillation_loss.share, batch)) * batch.num_ranks
        return (loss, {"loss": loss, **self.distillation_loss.last_terms}) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """``eval_loss``, the objective on held-out documents, and the measures of logitstore; on every rank alike."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = cast(Any, self.eval_dataset)[dataset]
        if not isinstance(dataset, LogitStoreDataset):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        loss = self.distillation_loss
        if dataset is not loss.dataset:
            loss = DistillationLoss(loss.student.model, dataset, objective=loss.objective)
        with self.accelerator.autocast():
            measured = loss.evaluate()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # In the same file as the step, so that no kill can part them.
        cast(dict[str, Any], self.state.stateful_callbacks)[_STATE] = self.source.state_dict()
        super()._save_checkpoint(model, trial)


class _EpochLoader(DataLoader[Any]):
    """As long as the first epoch; epochs differ by a few batches, so their borders drift, and nothing is left out."""

    dataset: LogitStoreDataset

    def __len__(self) -> int:
        return self.dataset.num_batches(0) * self.dataset.micro_batches


class _StreamPosition(TrainerCallback):
    """Puts the stream where a checkpoint says, and keeps the Trainer's epochs in step."""

    def __init__(self, source: LogitStoreDataset) -> None:
        self._source, self._begin = source, source.state_dict()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any
    ) -> None:
        position: Any = self._begin
        if state.global_step > 0:
            position = cast(dict[str, Any], state.stateful_callbacks or {}).get(_STATE)
        if position is None:
            raise TrainingError(
                f"the checkpoint of step {state.global_step} does not say where its stream stood: it was not written "
                "with DistillationMixin; begin from its weights instead of resume_from_checkpoint"
            )
        self._source.load_state_dict(position)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **found: Any) -> None:
        # A resumed epoch begins in its middle, which the Trainer, told to skip nothing, does not know.
        length = self._source.num_batches(0)
        state.epoch = state.global_step / length
        control.should_epoch_stop = control.should_epoch_stop or state.global_step % length == 0


def model_inputs(batch: BatchSlice) -> dict[str, Any]:
    """A slice in the form that a Trainer looks into.

    ``shift_labels`` are targets by output, as our loss charges them. ``labels`` are the same in transformers'
    convention, which shifts them back: labels[t] is predicted by output t - 1. What the last output of a full sequence
    predicts has no place there.
    """
    shift_labels = batch.shift_labels
    labels = torch.nn.functional.pad(shift_labels[:, :-1], (1, 0), value=-100)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    return {**inputs, "labels": labels, "shift_labels": shift_labels, _BATCH: batch}


def _let_forward_compute(model: PreTrainedModel) -> None:
    """Let ``model(distillation=f)`` return ``f()``: whatever wraps the model then wraps the loss, too."""
    own, before = type(model).forward, model.__dict__.get("forward")

    def forward(
        self: PreTrainedModel, *inputs: Any, distillation: Callable[[], Tensor] | None = None, **options: Any
    ) -> Any:
        if distillation is not None:
            return distillation()
        return own(self, *inputs, **options) if before is None else before(*inputs, **options)

    # Not functools.wraps: accelerate unwraps what has a __wrapped__.
    forward.__signature__ = signature(own)  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _check_arguments(args: TrainingArguments, options: dict[str, Any]) -> None:
    for name, reason in {
        "model_init": "give the model itself",
        "compute_loss_func": "the objective is the loss",
        "data_collator": "batches come collated",
    }.items():
        if options.get(name) is not None:
            raise ConfigError(f"{name}: cannot go with DistillationMixin: {reason}")
    if args.label_smoothing_factor:
        raise ConfigError("label_smoothing_factor: the teacher's distribution is smooth; leave it at 0")
    if args.torch_compile:
        raise ConfigError("torch_compile: it would compile the loss, too; call model.base_model.compile() instead")
    if args.n_gpu > 1:
        raise ConfigError(f"{args.n_gpu} GPUs in one process: DataParallel cannot be served; start it with torchrun")


def _set_arguments(args: TrainingArguments, dataset: LogitStoreDataset) -> None:
    """Fill in what the dataset decides."""
    if dataset.micro_batch_tokens is not None:
        if args.gradient_accumulation_steps not in (1, dataset.micro_batches):
            raise ConfigError(
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, but micro_batch_tokens="
                f"{dataset.micro_batch_tokens} makes {dataset.micro_batches}; give one of both"
            )
        args.gradient_accumulation_steps = dataset.micro_batches
    if args.max_steps <= 0:
        epochs = args.num_train_epochs if dataset.epochs is None else float(dataset.epochs)
        whole = math.floor(epochs)
        args.max_steps = sum(dataset.num_batches(epoch) for epoch in range(whole))
        args.max_steps += math.ceil((epochs - whole) * dataset.num_batches(whole))
    args.ignore_data_skip = True  # skipping is reading; see _StreamPosition


def _check_topology(trainer: Any, dataset: LogitStoreDataset) -> None:
    if dataset.world_size != trainer.args.world_size:
        raise ConfigError(
            f"the dataset is cut for {dataset.world_size} ranks, the Trainer has {trainer.args.world_size}; leave the "
            "dataset's rank and world_size out"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ConfigError("parallelism_config: only data parallelism (DDP, FSDP) is served")
