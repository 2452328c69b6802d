"""The folder of a training run: what it was asked for, and whether a command goes on with it or begins it.

The same command continues its own run. Another one is refused, unless ``--resume`` says that the run shall go on with
the new options; what decides the order of the data can never change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from logitstore.consumer.checkpoint import newest_checkpoint
from logitstore.errors import StorageError, TrainingError

_FILE = "run.json"


def enter_run_folder(folder: Path, options: dict[str, Any], *, resume: bool) -> Path | None:
    """Make or check a run's folder.

    Args:
        folder: ``--output``.
        options: of the command, JSON-able, that bear on the result.
        resume: continue even if they differ.

    Returns:
        The checkpoint to continue from, None to begin.

    Raises:
        TrainingError: the folder holds something else.
        StorageError: it cannot be written to.
    """
    checkpoint = newest_checkpoint(folder / "checkpoints")
    record = folder / _FILE
    if record.exists():
        earlier = json.loads(record.read_text())
        differing = sorted(name for name in {**earlier, **options} if earlier.get(name) != options.get(name))
        if differing and checkpoint is not None and not resume:
            name = differing[0]
            raise TrainingError(
                f"{folder}: holds a run with {name.replace('_', '-')} {earlier.get(name)!r}, now it is "
                f"{options.get(name)!r}; choose another --output, or pass --resume to go on with the new options"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise TrainingError(f"{folder}: not empty and not a run of `logitstore train`; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(options, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise StorageError(f"{folder}: cannot write: {error.strerror}; choose another --output") from error
    return checkpoint
