"""Signals to students: streaming, objectives and training.

For a user's own loop, see docs/library.md::

    from logitstore.consumer import DistillationLoss, LogitStoreDataset
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if not __name__.startswith("logitstore."):
    # Under the short name every module would exist twice, with two copies of each class.
    raise ImportError(f"import logitstore.{__name__}, not {__name__}")

if TYPE_CHECKING:
    from logitstore.consumer.dataset import LogitStoreDataset
    from logitstore.consumer.distillation_loss import DistillationLoss
    from logitstore.consumer.hf_trainer import DistillationMixin
    from logitstore.consumer.objectives import Objective, parse_objective

__all__ = ["DistillationLoss", "DistillationMixin", "LogitStoreDataset", "Objective", "parse_objective"]

_HOMES = {
    "DistillationLoss": "distillation_loss",
    "DistillationMixin": "hf_trainer",
    "LogitStoreDataset": "dataset",
    "Objective": "objectives",
    "parse_objective": "objectives",
}


def __getattr__(name: str) -> Any:
    """Import torch only for whoever uses a name that needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
