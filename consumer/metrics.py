"""Where a run's numbers go: a JSON line a record, and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from logitstore.errors import StorageError


class Metrics:
    """Appends to ``metrics.jsonl`` and ``tensorboard/`` in a run's folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Go on after ``first_step``: what was recorded of later steps is dropped, and will be written again.

        Raises:
            StorageError: the folder cannot be written to.
        """
        self._path = folder / "metrics.jsonl"
        try:
            _drop_after(self._path, first_step)
            # TensorBoard's own purge begins with the step that it is given.
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Record numbers of ``train`` or ``held_out`` after ``step`` updates; nothing if there are none.

        Raises:
            StorageError: the disk is full, say.
        """
        if not values:
            return
        record: dict[str, Any] = {"step": step, "split": split, **values}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            for name, value in values.items():
                self._board.add_scalar(f"{split}/{name}", value, step)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        try:
            self._board.close()
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path}: cannot record metrics ({error.strerror or error}); make room and run the same command again"
        )


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a line that a kill cut short
        if record["step"] <= step:
            kept.append(line + "\n")
    whole = path.with_suffix(".partial")
    whole.write_text("".join(kept))
    os.replace(whole, path)
