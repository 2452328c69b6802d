"""The loop: interrupted anywhere and resumed, it comes to the very same weights; what it writes others can read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_store import Silent, SmallStore, make_student, open_stream

from logitstore.consumer import stream as stream_module
from logitstore.consumer.checkpoint import newest_checkpoint
from logitstore.consumer.objectives import parse_objective
from logitstore.consumer.schedules import learning_rate_factor
from logitstore.consumer.trainer import Trainer, TrainerConfig
from logitstore.errors import ConfigError, StorageError, TrainingError

STEPS = 14


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_trainer(
    small: SmallStore,
    folder: Path,
    *,
    tokenizer: str = "tokenizer",
    objective: str = "kl:0.9,ce:0.1",
    student: dict[str, Any] | None = None,
    stream: dict[str, Any] | None = None,
    **config: Any,
) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    options = {"lr": 1e-2, "max_steps": STEPS, "save_every": 3, "log_every": 2, "evaluate_every": 5, **config}
    return Trainer(
        make_student(small, folder.parent, tokenizer, **(student or {})),
        open_stream(small, tokenizer, sequences=3, **(stream or {})),
        parse_objective(objective),
        TrainerConfig(**options),
        folder,
        "cpu",
        Silent(),
    )


class KilledError(Exception):
    """Stands for the end of a process."""


def run_until(trainer: Trainer, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, and die in the middle of the update after ``step``."""
    accumulate = trainer._accumulate

    def die(*arguments: Any) -> Any:
        if trainer.step == step:
            raise KilledError
        return accumulate(*arguments)

    monkeypatch.setattr(trainer, "_accumulate", die)
    with pytest.raises(KilledError):
        trainer.run()


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "tokens_per_s"} for record in found]


DROPOUT = {"model_type": "phi", "num_key_value_heads": 2, "resid_pdrop": 0.2}


@pytest.mark.parametrize(
    ("group_blocks", "options"),
    [
        pytest.param(100, {}, id="one group an epoch"),
        pytest.param(2, {}, id="several groups an epoch"),
        pytest.param(2, {"tokenizer": "other", "schedule": "wsd", "warmup_steps": 2}, id="another tokenizer"),
        pytest.param(2, {"micro_batch_tokens": 64, "student": DROPOUT}, id="accumulation and dropout"),
    ],
)
def test_resumed_runs_end_with_bitwise_the_same_weights_and_metrics(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_blocks: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(stream_module, "_GROUP_BYTES", 2048 * group_blocks)
    assert make_trainer(small, tmp_path / "whole", **options).run().step == STEPS
    folder = tmp_path / "killed"
    for step in (2, 4, 4, 11, STEPS):
        trainer = make_trainer(small, folder, **options)
        checkpoint = newest_checkpoint(folder / "checkpoints")
        if checkpoint is not None:
            torch.manual_seed(step)  # what random numbers there are elsewhere must not matter
            trainer.resume(checkpoint)
        if step < STEPS:
            run_until(trainer, step, monkeypatch)
        else:
            trainer.run()
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == expected
    assert without_time(records(folder)) == without_time(records(tmp_path / "whole"))


def test_a_finished_run_is_measured_again_and_writes_no_second_record(small: SmallStore, tmp_path: Path) -> None:
    first = make_trainer(small, tmp_path / "run")
    report = first.run()
    before = records(tmp_path / "run")
    second = make_trainer(small, tmp_path / "run")
    second.resume(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
    again = second.run()
    assert again.num_tokens == 0
    assert again.held_out == report.held_out
    assert records(tmp_path / "run") == before


def test_metrics_have_each_step_and_split_once(small: SmallStore, tmp_path: Path) -> None:
    make_trainer(small, tmp_path / "run").run()
    found = [(record["split"], record["step"]) for record in records(tmp_path / "run")]
    assert [step for split, step in found if split == "train"] == list(range(2, STEPS + 1, 2))
    assert [step for split, step in found if split == "held_out"] == [5, 10, STEPS]
    train = records(tmp_path / "run")[0]
    assert train.keys() >= {"loss", "ce", "kl/big", "kl/small", "grad_norm", "lr", "tokens_per_s", "num_tokens"}
    assert train["loss"] == pytest.approx(0.9 * 0.5 * (train["kl/big"] + train["kl/small"]) + 0.1 * train["ce"])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_schedules_are_applied(small: SmallStore, tmp_path: Path, schedule: str) -> None:
    options = {"schedule": schedule, "warmup_steps": 3, "max_steps": 8, "log_every": 1, "evaluate_every": 0}
    make_trainer(small, tmp_path / "run", objective="ce", stream={"teacher_weights": {}}, **options).run()
    rates = [record["lr"] for record in records(tmp_path / "run") if record["split"] == "train"]
    assert rates == [pytest.approx(1e-2 * learning_rate_factor(schedule, step, 8, 3)) for step in range(8)]
    assert rates[2] == 1e-2


def test_accumulation_changes_the_weights_by_rounding_only(small: SmallStore, tmp_path: Path) -> None:
    """One denominator for the whole batch, however it is sliced."""
    weights = []
    for name, micro in (("whole", None), ("sliced", 64)):
        trainer = make_trainer(small, tmp_path / name, micro_batch_tokens=micro, max_steps=4, lr=1e-3)
        assert len(list(trainer._slices(next(iter(trainer.stream))))) == (1 if micro is None else 3)
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.student.model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_epochs_see_every_token_that_often(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run", max_steps=None, epochs=2, lr=1e-4)
    data = trainer.stream.data
    num_predicted = sum(int(data.load(block).charged.sum()) for block in data.train_blocks)
    assert trainer.run().num_tokens == 2 * num_predicted
    assert trainer.stream.state.epoch == 2
    assert (trainer.stream.state.group, trainer.stream.state.batch) == (0, 0)


def test_max_steps_goes_beyond_an_epoch(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run", max_steps=30, save_every=100)
    assert trainer.stream.num_batches(0) < 30
    assert trainer.run().step == 30


def test_training_learns_from_the_teacher(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run", objective="kl", max_steps=60, evaluate_every=0, save_every=100)
    trainer.run()
    train = [record["loss"] for record in records(tmp_path / "run") if record["split"] == "train"]
    assert sum(train[-5:]) < 0.85 * sum(train[:5])


def test_a_stop_ends_after_the_step_with_a_checkpoint(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(small, tmp_path / "run", save_every=100)
    advance = trainer._accumulate

    def stop(*arguments: Any) -> Any:
        if trainer.step == 6:
            trainer.request_stop()
        return advance(*arguments)

    monkeypatch.setattr(trainer, "_accumulate", stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step-00000007"
    resumed = make_trainer(small, tmp_path / "run")
    resumed.resume(tmp_path / "run" / "checkpoints" / "step-00000007")
    resumed.run()
    make_trainer(small, tmp_path / "whole").run()
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected


def test_a_loss_that_is_not_a_number_ends_the_run(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run")
    with torch.no_grad():
        trainer.student.head[5] = math.nan
    with pytest.raises(TrainingError, match=r"step 1: loss nan.*smaller --lr and --resume"):
        trainer.run()
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") is None


def test_too_little_memory_names_the_option_that_helps(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(small, tmp_path / "run")

    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 7 PiB")

    monkeypatch.setattr(trainer.student, "hidden", too_large)
    with pytest.raises(TrainingError, match="--micro-batch-tokens"):
        trainer.run()


def test_a_full_disk_while_saving_the_student_says_so(
    small: SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(small, tmp_path / "run", max_steps=2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.student.model, "save_pretrained", full)
    with pytest.raises(StorageError, match=r"cannot save the student .*No space left"):
        trainer.run()
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.parametrize("tokenizer", ["tokenizer", "other"])
def test_the_output_loads_with_transformers(small: SmallStore, tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make_trainer(small, tmp_path / "run", tokenizer=tokenizer, max_steps=2)
    trainer.run()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    for name, parameter in trainer.student.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
    saved, original = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "run", getattr(small, tokenizer)))
    text = "Say naïve 你好 1024 times.\n"
    assert saved(text)["input_ids"] == original(text)["input_ids"]
    chat = [{"role": "user", "content": "Hi."}]
    assert saved.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)


def test_sequences_longer_than_the_students_positions_are_refused(small: SmallStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--seq-length 64: the student has 32 positions"):
        make_trainer(small, tmp_path / "run", student={"max_position_embeddings": 32})


def test_micro_batches_of_less_than_a_sequence_are_refused(small: SmallStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--micro-batch-tokens 63: less than one sequence"):
        make_trainer(small, tmp_path / "run", micro_batch_tokens=63)


def test_weight_decay_is_for_matrices_only(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run", weight_decay=0.3)
    matrices, others = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in others["params"]} == {1}


def test_bf16_trains_with_weights_in_float32(small: SmallStore, tmp_path: Path) -> None:
    trainer = make_trainer(small, tmp_path / "run", bf16=True, max_steps=2)
    assert math.isfinite(trainer.run().held_out["cross_entropy"])
    assert {p.dtype for p in trainer.student.model.parameters()} == {torch.float32}
