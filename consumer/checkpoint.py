"""Checkpoints: all that a bitwise continuation needs, as safetensors and JSON; a folder is complete or absent.

checkpoints/step-00000200/
    model.safetensors       weights (tied ones once)
    optimizer.safetensors   moments by parameter, and the states of torch's random numbers
    state.json              step, tokens seen, stream state, the digest of both files, and its own
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from logitstore.consumer.stream import StreamState
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StorageError, TrainingError
from logitstore.records import open_record, seal_record

FORMAT = 1
KEPT = 2
_RANDOM = "random/"


@dataclass(frozen=True)
class Progress:
    """How far a run is: ``step`` updates were made, on ``num_tokens`` input tokens."""

    step: int
    num_tokens: int
    stream: StreamState


def save_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Write a checkpoint and drop all but the newest ``KEPT``.

    Raises:
        StorageError: the disk is full, say. The older checkpoints are untouched.
    """
    target = folder / f"step-{progress.step:08d}"
    temporary = folder / f".{target.name}.partial"
    tensors: dict[str, dict[str, Tensor]] = {
        "model": dict(model.named_parameters()),
        "optimizer": _optimizer_tensors(model, optimizer),
    }
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        digests = {name: _write(temporary / f"{name}.safetensors", found) for name, found in tensors.items()}
        state = {
            "format": FORMAT,
            "step": progress.step,
            "num_tokens": progress.num_tokens,
            "stream": progress.stream.to_json(),
            "digests": digests,
        }
        _write_synced(temporary / "state.json", seal_record(state))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"{target}: cannot write the checkpoint ({error.strerror or error}); older checkpoints are whole: free "
            "some space and run the same command again"
        ) from error
    for old in sorted(folder.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest_checkpoint(folder: Path) -> Path | None:
    return max(folder.glob("step-*"), default=None)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a checkpoint's weights, moments and random state in place.

    Raises:
        TrainingError: the checkpoint is damaged, of another model or of a newer version.
    """
    try:
        state = open_record((path / "state.json").read_bytes(), "state.json")
        if state["format"] > FORMAT:
            raise TrainingError(f"{path}: a checkpoint of format {state['format']}; upgrade logitstore to continue")
        found = {name: _read(path / f"{name}.safetensors", digest) for name, digest in state["digests"].items()}
    except (OSError, DamageError, ValueError, SafetensorError) as error:
        reason = str(error).replace("; run `logitstore verify`", "")
        raise TrainingError(f"{path}: a damaged checkpoint ({reason}); delete it to go on from an older one") from error
    parameters = dict(model.named_parameters())
    if {name: p.shape for name, p in parameters.items()} != {name: t.shape for name, t in found["model"].items()}:
        raise TrainingError(f"{path}: a checkpoint of another student; choose another --output")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found["model"][name])
    _restore_optimizer(model, optimizer, found["optimizer"])
    return Progress(state["step"], state["num_tokens"], StreamState.from_json(state["stream"]))


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"{_RANDOM}cpu": torch.get_rng_state()}
    for device in _accelerators(model):
        tensors[f"{_RANDOM}{device}"] = torch.cuda.get_rng_state(device)
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = torch.as_tensor(value)
    return tensors


def _restore_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors[f"{_RANDOM}cpu"])
    for device in _accelerators(model):
        if (state := tensors.get(f"{_RANDOM}{device}")) is not None:  # absent if the run began on another device
            torch.cuda.set_rng_state(state, device)
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        if key.startswith(_RANDOM):
            continue
        # The step count too: the fused AdamW wants it beside the moments, where the parameter is.
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device)


def _accelerators(model: torch.nn.Module) -> list[torch.device]:
    return sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)


def _write(path: Path, tensors: dict[str, Any]) -> str:
    data = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    _write_synced(path, data)
    return digest_bytes(data)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    data = path.read_bytes()
    if digest_bytes(data) != digest:
        raise ValueError(f"{path.name} does not match its digest")
    return load(data)
