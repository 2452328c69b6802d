"""The loss of a user's own loop.

The number to minimise is the mean over the global batch's charged tokens. A slice gives its share of that mean: its sum
over the global batch's count, so that shares of all micro-batches and ranks add up to the mean, and the gradients that
accumulate are the mean's.

Wrappers that reduce gradients (DDP, FSDP) count on their own forward being called, and average over ranks instead of
adding. Hence ``module()``: the student with its loss as one module, whose forward is the loss, times the number of
ranks. That is what to wrap. A wrapped model alone would not do: its head's weights are used outside of its forward,
where FSDP has taken them away and DDP does not see them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from logitstore.consumer.batch_loss import BatchLoss
from logitstore.consumer.dataset import BatchSlice, LogitStoreDataset
from logitstore.consumer.evaluation import evaluate
from logitstore.consumer.objectives import Objective, parse_objective
from logitstore.consumer.student import Student
from logitstore.errors import ConfigError


class DistillationLoss:
    """An objective on a model and a dataset's batches.

    Attributes:
        last_terms: of the last slice, detached: ``loss``, and each term unweighted, as its share of the mean.
    """

    def __init__(
        self, model: PreTrainedModel, dataset: LogitStoreDataset, *, objective: str | Objective = "kl:0.9,ce:0.1"
    ) -> None:
        """Check that the model can be trained so.

        Args:
            model: a causal language model, not wrapped yet, on whatever device.
            dataset: made with its tokenizer. The temperature is the dataset's.
            objective: terms with weights; of ``parse_objective(text, tau=..., teacher_weighting=...)`` for more.

        Raises:
            ModelError: the head on the hidden states does not give the logits, or packed documents see each other.
            TokenizerError: the dataset's tokenizer has ids that the model does not.
            ConfigError: the objective does not fit the dataset's teachers, or the model is wrapped.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"DistillationLoss: got a {type(model).__name__}, expected a PreTrainedModel: make the loss before the "
                "model is wrapped, then wrap loss.module()"
            )
        self.dataset = dataset
        self.objective = parse_objective(objective) if isinstance(objective, str) else objective
        self.student = Student.of(model, dataset.tokenizer)
        self.student.check_length(dataset.stream.config.sequence_length)
        teachers = dataset.stream.data.teachers
        self._loss = BatchLoss(self.objective, teachers, dataset.temperature, self.student)
        self.last_terms: dict[str, Tensor] = {}

    def __call__(self, model: nn.Module, batch: BatchSlice) -> Tensor:
        """The loss of a slice, a scalar with its gradient.

        Args:
            model: the model itself: the result is the slice's share, to be added over micro-batches and ranks. Or
                what wraps ``module()``: the same times the number of ranks, whose mean over ranks is wanted.
            batch: of the dataset; goes to the model's device.

        Raises:
            ConfigError: the model is wrapped, or another one.
        """
        if model is self.student.model:
            return self.share(batch)
        if any(isinstance(part, StudentWithLoss) for part in model.modules()):
            return model(batch)
        raise ConfigError(
            f"DistillationLoss: got a {type(model).__name__}, expected the {type(self.student.model).__name__} that it "
            "was made for, or a wrapper of loss.module(): DDP and FSDP must wrap the loss, too; to compile, use "
            "model.base_model.compile()"
        )

    def module(self) -> StudentWithLoss:
        """The student with its loss, to be wrapped in DDP or FSDP: ``loss = DDP(loss_of.module())(batch)``."""
        return StudentWithLoss(self)

    def share(self, batch: BatchSlice) -> Tensor:
        """The slice's share of the global batch's mean."""
        self._require_whole_head()
        sums = self._loss(self.student, batch.to(self.student.head.device, non_blocking=True))
        denominator = max(1, batch.num_charged_global)
        found = {"loss": sums.total.detach(), **sums.terms}
        self.last_terms = {name: value / denominator for name, value in found.items()}
        if torch.is_grad_enabled():
            self.dataset.advance(batch)
        return sums.total / denominator

    @torch.no_grad()
    def terms(self, batch: BatchSlice) -> dict[str, Tensor]:
        """What ``last_terms`` would be, without a gradient."""
        self.share(batch)
        return self.last_terms

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Measure the student on the dataset's held-out blocks; not sharded, so all ranks may, or one.

        Returns:
            ``loss``, the mean of the objective, and the measures of ``logitstore.consumer.evaluation.evaluate``.
            Empty if nothing is held out.
        """
        self._require_whole_head()
        stream, device = self.dataset.stream, self.student.head.device
        training = self.student.model.training
        self.student.model.eval()
        total, num_charged, size = 0.0, 0, self._slice_sequences
        for bins in stream.held_out(size):
            batch = stream.collate(bins).to(device)
            total += self._loss(self.student, batch).total.item()
            num_charged += batch.num_charged
        measures = evaluate(self.student, stream, str(device), size) if num_charged else {}
        self.student.model.train(training)
        return {"loss": total / num_charged, **measures} if num_charged else {}

    def _require_whole_head(self) -> None:
        if isinstance(self.student.head, DTensor):
            raise ConfigError(
                "DistillationLoss: the head's weights are sharded here: call fully_shard on loss.module() as the root, "
                "not on the model, leave the head to the root, and evaluate what is saved"
            )

    @property
    def _slice_sequences(self) -> int:
        num_slices = self.dataset.world_size * self.dataset.micro_batches
        return -(-self.dataset.stream.config.batch_sequences // num_slices)


class StudentWithLoss(nn.Module):
    """See ``DistillationLoss.module``. Its parameters are the model's."""

    def __init__(self, loss: DistillationLoss) -> None:
        super().__init__()
        self.model, self.loss = loss.student.model, loss

    def forward(self, batch: BatchSlice) -> Tensor:
        """The loss of a slice, to be averaged over ranks: its share times their number."""
        return self.loss.share(batch) * batch.num_ranks
