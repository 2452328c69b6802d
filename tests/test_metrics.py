"""metrics.jsonl: one record a step and split, whatever was killed and resumed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from logitstore.consumer.metrics import Metrics
from logitstore.errors import StorageError


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_written_line_by_line_and_to_tensorboard(tmp_path: Path) -> None:
    with closing(Metrics(tmp_path, 0)) as metrics:
        metrics.write(1, "train", {"loss": 2.5, "lr": 0.1})
        assert records(tmp_path) == [{"step": 1, "split": "train", "loss": 2.5, "lr": 0.1}]
        metrics.write(1, "held_out", {"cross_entropy": 3.0})
    assert [record["split"] for record in records(tmp_path)] == ["train", "held_out"]
    assert board(tmp_path) == {
        ("train/loss", 1): 2.5,
        ("train/lr", 1): pytest.approx(0.1),
        ("held_out/cross_entropy", 1): 3.0,
    }


def board(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def test_metrics_without_values_are_no_record(tmp_path: Path) -> None:
    with closing(Metrics(tmp_path, 0)) as metrics:
        metrics.write(1, "held_out", {})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_metrics_drop_what_will_be_written_again(tmp_path: Path) -> None:
    with closing(Metrics(tmp_path, 0)) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, "train", {"loss": float(step)})
    with closing(Metrics(tmp_path, 2)) as metrics:
        metrics.write(3, "train", {"loss": 30.0})
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert board(tmp_path)["train/loss", 3] == 30.0


def test_metrics_forget_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "spl')
    with closing(Metrics(tmp_path, 2)) as metrics:
        metrics.write(3, "train", {"loss": 1.0})
    assert [record["step"] for record in records(tmp_path)] == [1, 3]


def test_metrics_name_their_file_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Metrics(tmp_path, 0)) as metrics:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot record metrics \(No space left on device\)"):
            metrics.write(1, "train", {"loss": 1.0})
