"""The folder of a run: begin, go on, or refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from logitstore.consumer.run_folder import enter_run_folder
from logitstore.errors import StorageError, TrainingError

OPTIONS = {"lr": 0.1, "objective": "kl", "manifest": "abc", "weights": (1, 2)}


def add_checkpoint(folder: Path, step: int = 5) -> Path:
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    return checkpoint


def test_enter_makes_a_folder_and_records_the_options(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    assert enter_run_folder(folder, OPTIONS, resume=False) is None
    assert json.loads((folder / "run.json").read_text()) == {**OPTIONS, "weights": [1, 2]}


@pytest.mark.parametrize("resume", [False, True])
def test_enter_goes_on_from_the_newest_checkpoint_of_the_same_options(tmp_path: Path, resume: bool) -> None:
    enter_run_folder(tmp_path, OPTIONS, resume=False)
    add_checkpoint(tmp_path, 5)
    newest = add_checkpoint(tmp_path, 10)
    (tmp_path / "checkpoints" / ".step-00000015.partial").mkdir()
    assert enter_run_folder(tmp_path, OPTIONS, resume=resume) == newest


def test_enter_refuses_other_options_unless_told_to_resume(tmp_path: Path) -> None:
    enter_run_folder(tmp_path, OPTIONS, resume=False)
    checkpoint = add_checkpoint(tmp_path)
    with pytest.raises(TrainingError, match=r"run with lr 0\.1, now it is 0\.2.*--resume"):
        enter_run_folder(tmp_path, {**OPTIONS, "lr": 0.2}, resume=False)
    assert json.loads((tmp_path / "run.json").read_text())["lr"] == 0.1
    assert enter_run_folder(tmp_path, {**OPTIONS, "lr": 0.2}, resume=True) == checkpoint
    assert json.loads((tmp_path / "run.json").read_text())["lr"] == 0.2


@pytest.mark.parametrize("resume", [False, True])
def test_enter_never_goes_on_with_other_data(tmp_path: Path, resume: bool) -> None:
    enter_run_folder(tmp_path, OPTIONS, resume=False)
    add_checkpoint(tmp_path)
    with pytest.raises(TrainingError, match="--dataset-version"):
        enter_run_folder(tmp_path, {**OPTIONS, "manifest": "def"}, resume=resume)


def test_enter_begins_anew_with_other_options_where_nothing_was_saved(tmp_path: Path) -> None:
    enter_run_folder(tmp_path, OPTIONS, resume=False)
    assert enter_run_folder(tmp_path, {**OPTIONS, "lr": 0.2}, resume=False) is None


def test_enter_refuses_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(TrainingError, match="not empty and not a run"):
        enter_run_folder(tmp_path, OPTIONS, resume=True)


def test_enter_begins_where_a_kill_came_before_the_first_record(tmp_path: Path) -> None:
    (tmp_path / ".run.json.partial").write_text("{")
    assert enter_run_folder(tmp_path, OPTIONS, resume=False) is None


def test_enter_refuses_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(StorageError, match="not a usable folder"):
        enter_run_folder(tmp_path / "run", OPTIONS, resume=False)
    with pytest.raises(StorageError, match="not a usable folder"):
        enter_run_folder(tmp_path / "run" / "below", OPTIONS, resume=False)


def test_enter_refuses_an_unreadable_record(tmp_path: Path) -> None:
    add_checkpoint(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(TrainingError, match="not JSON"):
        enter_run_folder(tmp_path, OPTIONS, resume=False)
