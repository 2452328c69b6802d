"""The folder of a training run: what it was asked for, and whether a command goes on with it or begins it.

The same command continues its own run. Another one is refused, unless ``--resume`` says that the run shall go on with
the new options; what decides the order of the data can never change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from logitstore.consumer.checkpoint import newest_checkpoint
from logitstore.errors import StorageError, TrainingError

_FILE = "run.json"
DATASET = "manifest"
"""The option that names the data's content. Nothing makes a run go on with other data."""


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
    # As JSON has it, so that what is compared is what was written: a tuple comes back as a list.
    options = json.loads(json.dumps(options))
    checkpoint = newest_checkpoint(folder / "checkpoints")
    record, partial = folder / _FILE, folder / f".{_FILE}.partial"
    try:
        if record.exists():
            if checkpoint is not None:
                _check_same(folder, json.loads(record.read_text()), options, resume)
        elif folder.exists() and any(entry != partial for entry in folder.iterdir()):
            raise TrainingError(f"{folder}: not empty and not a run of `logitstore train`; choose another --output")
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(options, indent=1, sort_keys=True) + "\n")
        os.replace(partial, record)
    except OSError as error:
        raise StorageError(f"{folder}: not a usable folder ({error.strerror}); choose another --output") from error
    except ValueError as error:
        raise TrainingError(f"{record}: not JSON ({error}); choose another --output") from error
    return checkpoint


def _check_same(folder: Path, earlier: dict[str, Any], options: dict[str, Any], resume: bool) -> None:
    differing = sorted(name for name in {**earlier, **options} if earlier.get(name) != options.get(name))
    if DATASET in differing:
        raise TrainingError(
            f"{folder}: holds a run on another version of the dataset (manifest {str(earlier.get(DATASET))[:16]}, now "
            f"{str(options.get(DATASET))[:16]}); name that one with --dataset-version, or choose another --output"
        )
    if differing and not resume:
        name = differing[0]
        raise TrainingError(
            f"{folder}: holds a run with {name.replace('_', '-')} {earlier.get(name)!r}, now it is "
            f"{options.get(name)!r}; choose another --output, or pass --resume to go on with the new options"
        )
