"""Where a run's numbers go: a JSON line a record, and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Appends to ``metrics.jsonl`` and ``tensorboard/`` in a run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._path = folder / "metrics.jsonl"
        self._forget_from(first_step)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Record numbers of ``train`` or ``held_out`` after ``step`` updates."""
        record: dict[str, Any] = {"step": step, "split": split, **values}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        self._board.close()

    def _forget_from(self, first_step: int) -> None:
        """Drop records after the step that a run resumes from: they will be written again."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a line that a kill cut short
            if record["step"] <= first_step:
                kept.append(line + "\n")
        self._path.write_text("".join(kept))
