"""Checkpoints: complete or absent, proven when read, and all that a continuation needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.consumer import checkpoint as checkpoint_module
from logitstore.consumer.checkpoint import Progress, load_checkpoint, newest_checkpoint, save_checkpoint
from logitstore.consumer.stream import StreamConfig, StreamState
from logitstore.errors import StorageError, TrainingError
from logitstore.records import seal_record

STREAM = StreamState("0" * 64, StreamConfig(sequence_length=8, batch_tokens=64, seed=3), epoch=1, group=2, batch=3)


def make_run(width: int = 4, steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, model[0].in_features)).pow(2).mean().backward()  # type: ignore[index]
    optimizer.step()
    optimizer.zero_grad()


def test_load_continues_bit_by_bit(tmp_path: Path) -> None:
    """Weights, moments, step counts and random numbers."""
    model, optimizer = make_run()
    path = save_checkpoint(tmp_path, model, optimizer, Progress(2, 100, STREAM))
    for _ in range(3):
        step(model, optimizer)
    other, its_optimizer = make_run(steps=0)
    torch.manual_seed(99)
    assert load_checkpoint(path, other, its_optimizer) == Progress(2, 100, STREAM)
    for _ in range(3):
        step(other, its_optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_load_keeps_tied_weights_tied(tmp_path: Path) -> None:
    def tied() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"inputs": torch.nn.Embedding(6, 3), "outputs": torch.nn.Linear(3, 6, bias=False)})
        model["outputs"].weight = model["inputs"].weight
        return model

    model, other = tied(), tied()
    path = save_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()), Progress(1, 1, STREAM))
    load_checkpoint(path, other, torch.optim.AdamW(other.parameters()))
    assert other["outputs"].weight is other["inputs"].weight
    assert torch.equal(other["inputs"].weight, model["inputs"].weight)


def test_save_keeps_the_newest_and_newest_finds_it(tmp_path: Path) -> None:
    model, optimizer = make_run()
    assert newest_checkpoint(tmp_path) is None
    for number in (1, 2, 9, 10):
        save_checkpoint(tmp_path, model, optimizer, Progress(number, 1, STREAM))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000010"


def test_save_again_at_the_same_step_replaces(tmp_path: Path) -> None:
    model, optimizer = make_run()
    save_checkpoint(tmp_path, model, optimizer, Progress(1, 1, STREAM))
    path = save_checkpoint(tmp_path, model, optimizer, Progress(1, 2, STREAM))
    assert load_checkpoint(path, model, optimizer).num_tokens == 2


@pytest.mark.parametrize("failing", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_full_disk_leaves_older_checkpoints_and_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    model, optimizer = make_run()
    older = save_checkpoint(tmp_path, model, optimizer, Progress(1, 1, STREAM))
    write = checkpoint_module._write_synced

    def fill_up(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2] if path.name == failing else data)
        if path.name == failing:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(checkpoint_module, "_write_synced", fill_up)
    with pytest.raises(StorageError, match=r"step-00000002.*No space left.*older checkpoints are whole"):
        save_checkpoint(tmp_path, model, optimizer, Progress(2, 1, STREAM))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(older, model, optimizer).step == 1


def test_a_kill_while_saving_leaves_nothing_that_is_taken_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make_run()
    older = save_checkpoint(tmp_path, model, optimizer, Progress(1, 1, STREAM))

    def killed(*_: object) -> None:
        raise SystemExit  # nothing cleans up after it, as after a kill

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path, model, optimizer, Progress(2, 1, STREAM))
    assert newest_checkpoint(tmp_path) == older
    assert newest_checkpoint(tmp_path) != save_checkpoint(tmp_path, model, optimizer, Progress(2, 1, STREAM))


@settings(max_examples=40)
@given(st.sampled_from(["model.safetensors", "optimizer.safetensors", "state.json"]), st.data())
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    model, optimizer = make_run()
    path = save_checkpoint(tmp_path_factory.mktemp("run"), model, optimizer, Progress(2, 1, STREAM))
    untouched = (path / name).read_bytes()
    content = bytearray(untouched)
    content[data.draw(st.integers(0, len(content) - 2))] ^= 1 << data.draw(st.integers(0, 7))
    (path / name).write_bytes(content)
    if name == "state.json" and is_same_json(content, untouched):
        return  # white space is free
    with pytest.raises(TrainingError, match=r"damaged checkpoint .*; delete it to go on from an older one"):
        load_checkpoint(path, *make_run(steps=0))


def is_same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_missing_or_cut_file_is_a_damaged_checkpoint(tmp_path: Path, name: str) -> None:
    model, optimizer = make_run()
    path = save_checkpoint(tmp_path, model, optimizer, Progress(2, 1, STREAM))
    (path / name).write_bytes((path / name).read_bytes()[:20])
    with pytest.raises(TrainingError, match="damaged checkpoint"):
        load_checkpoint(path, model, optimizer)
    (path / name).unlink()
    with pytest.raises(TrainingError, match="damaged checkpoint"):
        load_checkpoint(path, model, optimizer)


def test_a_checkpoint_of_another_student_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *make_run(), Progress(2, 1, STREAM))
    with pytest.raises(TrainingError, match="another student"):
        load_checkpoint(path, *make_run(width=5))


def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    model, optimizer = make_run()
    path = save_checkpoint(tmp_path, model, optimizer, Progress(2, 1, STREAM))
    state = json.loads((path / "state.json").read_text())
    del state["digest"]
    (path / "state.json").write_bytes(seal_record({**state, "format": 2}))
    with pytest.raises(TrainingError, match="format 2; upgrade"):
        load_checkpoint(path, model, optimizer)
