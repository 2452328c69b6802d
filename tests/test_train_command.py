"""``logitstore train`` from a terminal: killed and repeated, resumed, refused in one line."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from small_store import SmallStore, build_llama, write_student_config
from terminal import COMMAND, Ran, run_here

from logitstore.records import open_record, seal_record

pytestmark = pytest.mark.usefixtures("settings_of_torch")


def arguments(small: SmallStore, folder: Path, **changes: Any) -> list[str]:
    """A command that works, but for ``changes``; None leaves an option out."""
    options: dict[str, Any] = {
        "dataset": "mixed",
        "output": folder / "run",
        "student_config": folder / "student.json",
        "selection": "topk",
        "seq_length": 64,
        "batch_tokens": 192,
        "max_steps": 4,
        "lr": 0.01,
        "threads": 1,
    }
    options |= changes
    if options["student_config"] == folder / "student.json":
        write_student_config(folder / "student.json")
    store = options.pop("store", small.url)
    command = ["train", str(store)]
    for name, value in options.items():
        if value is True:
            command.append(f"--{name.replace('_', '-')}")
        elif value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def steps_of(folder: Path) -> list[int]:
    """Steps of the records in metrics.jsonl of the training split."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if '"train"' in line and line.endswith("}")]


def test_train_makes_a_model_folder_and_says_what_it_came_to(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_here(capsys, *arguments(small, tmp_path))
    assert ran.code == 0
    assert "step 4: " in ran.out
    assert "held-out bits_per_byte" in ran.out
    assert "Loading weights" not in ran.err
    assert "Writing model shards" not in ran.err
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "tensorboard", "run.json"}


def test_train_prints_json_alone_on_request(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run_here(capsys, *arguments(small, tmp_path, json=True))
    found = json.loads(ran.out)
    assert found.keys() == {"output", "step", "tokens_per_s", "held_out"}
    assert found["step"] == 4
    assert found["held_out"].keys() >= {"bits_per_byte", "cross_entropy", "kl/big", "top1_agreement/small"}


def test_train_says_nothing_is_left_to_do_of_a_finished_run(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(capsys, *arguments(small, tmp_path))
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    ran = run_here(capsys, *arguments(small, tmp_path))
    assert "already finished" in ran.out
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_train_goes_on_with_other_options_only_when_told_to(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(capsys, *arguments(small, tmp_path))
    longer = arguments(small, tmp_path, max_steps=6)
    assert "--resume" in run_here(capsys, *longer).refusal()
    ran = run_here(capsys, *longer, "--resume")
    assert ran.code == 0
    assert "going on after step 4" in ran.err
    assert "step 6: " in ran.out


def test_train_goes_on_from_a_store_that_has_moved(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(capsys, *arguments(small, tmp_path))
    moved = shutil.copytree(small.url, tmp_path / "moved")
    assert "already finished" in run_here(capsys, *arguments(small, tmp_path, store=moved)).out


@pytest.mark.parametrize("selection", ["topk", "threshold"])
def test_train_takes_a_pretrained_student_with_another_tokenizer(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], selection: str
) -> None:
    student = build_llama(tmp_path / "student", small.other, vocab_size=430)
    options = {"student": student, "student_config": None, "selection": selection, "teacher_weights": "big=3,small=1"}
    ran = run_here(capsys, *arguments(small, tmp_path, **options))
    assert ran.code == 0, ran.err
    assert "Loading weights" not in ran.err


def test_train_from_a_tokenizer_of_its_own_saves_that(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_student_config(tmp_path / "wide.json", vocab_size=440)
    options = {"student_config": tmp_path / "wide.json", "student_tokenizer": small.other}
    assert run_here(capsys, *arguments(small, tmp_path, **options)).code == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "run" / name).read_bytes() == (Path(small.other) / name).read_bytes()


def test_train_takes_the_chat_template_that_produce_was_given(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(small.other, tmp_path / "bare")
    template = (bare / "chat_template.jinja").rename(tmp_path / "template.jinja")
    write_student_config(tmp_path / "wide.json", vocab_size=440)
    options = {"student_config": tmp_path / "wide.json", "student_tokenizer": bare}
    assert "has no tokens" in run_here(capsys, *arguments(small, tmp_path, **options)).refusal()
    assert run_here(capsys, *arguments(small, tmp_path, **options, chat_template=template)).code == 0
    assert (tmp_path / "run" / "chat_template.jinja").read_bytes() == template.read_bytes()


def refused(small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    message = run_here(capsys, *arguments(small, tmp_path, **changes)).refusal()
    assert not (tmp_path / "run" / "checkpoints").exists()
    return message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"store": "/nowhere/at/all"}, ["/nowhere/at/all", "no store here"]),
        ({"dataset": "mixt"}, ["no dataset 'mixt'", "there are: mixed"]),
        ({"dataset_version": 9}, ["no version 9"]),
        ({"student": "x", "student_config": "y"}, ["--student MODEL", "--student-config"]),
        ({"student_config": None}, ["--student MODEL", "--student-config"]),
        ({"student": "/nowhere", "student_config": None}, ["/nowhere: no such folder"]),
        ({"student_config": "/nowhere.json"}, ["--student-config /nowhere.json"]),
        ({"objective": "kl:0.9,ze:0.1"}, ["unknown term 'ze'", "'ce'"]),
        ({"objective": "kl:much"}, ["'much'", "expected a number"]),
        ({"objective": "ce:0"}, ["no term has a positive weight"]),
        ({"teacher_weights": "big"}, ["expected NAME=WEIGHT"]),
        ({"teacher_weights": "tall=1"}, ["no teacher 'tall'", "big"]),
        ({"teacher_weights": "big=1,big=2"}, ["'big' is there twice"]),
        ({"temperature": 1.5}, ["--temperature 1.5", "--temperatures 1,1.5"]),
        ({"temperature": 0}, ["--temperature"]),
        ({"temperature": 2, "selection": "threshold"}, ["cannot be served from sampled entries"]),
        ({"selection": None}, ["topk:6", "--selection"]),
        ({"selection": "topk:7"}, ["topk:6"]),
        ({"batch_tokens": 32}, ["--batch-tokens 32", "--seq-length 64"]),
        ({"seq_length": 1024, "batch_tokens": 2048}, ["--seq-length 1024", "512 positions"]),
        ({"device": "quantum"}, ["--device quantum"]),
        ({"lr": "fast"}, ["--lr", "'fast'"]),
        ({"schedule": "cosinus"}, ["cosinus", "cosine"]),
        ({"student_tokenizer": "/nowhere"}, ["/nowhere"]),
        ({"max_step": 3}, ["--max-step", "--max-steps"]),
        ({"output": None}, ["--output"]),
    ],
)
def test_train_refuses_in_one_line(
    small: SmallStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    expected: list[str],
) -> None:
    if "max_step" in changes:
        changes = {**changes, "max_steps": None}
    message = refused(small, tmp_path, capsys, **changes)
    for part in expected:
        assert part in message


def test_train_refuses_a_file_as_its_folder(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "choose another --output" in refused(small, tmp_path, capsys, output=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_train_names_the_command_for_a_tokenizer_that_the_dataset_lacks(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(small, tmp_path, capsys, student_tokenizer=small.stranger)
    assert "has no tokens of this student's tokenizer (it has those of: " in message
    assert "logitstore align STORE --dataset mixed --student-tokenizer TOKENIZER" in message


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"model_type": "lama"}', '{"model_type": "llama", "hidden_size": "wide"}',
     '{"model_type": "llama", "hidden_size": 7, "num_attention_heads": 2, "vocab_size": 352}'],
)  # fmt: skip
def test_train_refuses_an_unusable_configuration(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "broken.json").write_text(content)
    message = refused(small, tmp_path, capsys, student_config=tmp_path / "broken.json")
    assert "broken.json: not a usable model configuration" in message


def test_train_refuses_a_student_narrower_than_its_tokenizer(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_student_config(tmp_path / "narrow.json", vocab_size=100)
    assert "340 tokens, the student only 100" in refused(
        small, tmp_path, capsys, student_config=tmp_path / "narrow.json"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "{"), ("config.json", None), ("model.safetensors", "x" * 99), ("model.safetensors", None),
     ("tokenizer.json", "{"), ("tokenizer.json", None)],
)  # fmt: skip
def test_train_refuses_a_broken_student_folder(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None
) -> None:
    student = shutil.copytree(small.teachers["small"], tmp_path / "student")
    if content is None:
        (student / name).unlink()
    else:
        (student / name).write_text(content)
    assert str(student) in refused(small, tmp_path, capsys, student=student, student_config=None)


def test_train_refuses_the_folder_of_something_else(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "photo.jpg").touch()
    assert "not empty and not a run" in refused(small, tmp_path, capsys)


def test_train_names_a_damaged_chunk_and_verify(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(small.url, tmp_path / "store")
    manifest = small.version.manifest
    column = next(c for c in manifest.find("signal", signal="sparse") if c.template["selection"]["policy"] == "topk")
    block = next(n for n, block in enumerate(manifest.plan.blocks) if block.split == "train")
    cell = column.cells[block]
    assert cell is not None
    path = store / "parts" / cell.part / "sparse" / "c" / "0" / "0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    message = refused(small, tmp_path, capsys, store=store)
    assert str(path) in message
    assert "logitstore verify" in message


def test_train_refuses_a_store_of_a_newer_format(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(small.url, tmp_path / "store")
    header = open_record((store / "store.json").read_bytes(), "")
    (store / "store.json").write_bytes(seal_record({**header, "format": header["format"] + 1}))
    assert "upgrade logitstore" in refused(small, tmp_path, capsys, store=store)


def test_train_names_a_damaged_checkpoint(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(capsys, *arguments(small, tmp_path))
    state = tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    message = run_here(capsys, *arguments(small, tmp_path)).refusal()
    assert "step-00000004: a damaged checkpoint" in message
    assert "delete it" in message


LONG = {"max_steps": 80, "save_every": 3, "log_every": 1, "epochs": 1}


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_during_training(
    small: SmallStore, folder: Path, number: signal.Signals, step: int, delay: float
) -> tuple[Ran, int]:
    """Run the command, and send a signal ``delay`` seconds after ``step`` was recorded; also its last step."""
    process = start(arguments(small, folder, **LONG))
    try:
        deadline = time.monotonic() + 90
        while max(steps_of(folder / "run"), default=0) < step and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return Ran(process.returncode, out, err), max(steps_of(folder / "run"), default=0)


def uninterrupted(small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> bytes:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_here(capsys, *arguments(small, whole, **LONG)).code == 0
    return (whole / "run" / "model.safetensors").read_bytes()


def test_kill_and_the_same_command_again_end_with_bitwise_the_same_weights(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real SIGKILL at a random instant, then a real SIGTERM, then the command to its end."""
    expected = uninterrupted(small, tmp_path, capsys)
    killed, step = end_during_training(small, tmp_path, signal.SIGKILL, random.randint(4, 12), random.uniform(0, 0.05))
    assert killed.code == -signal.SIGKILL
    assert step < LONG["max_steps"]
    stopped, step = end_during_training(small, tmp_path, signal.SIGTERM, step + 3, 0.0)
    assert stopped.code == 130, stopped.err
    assert stopped.err.splitlines()[-1].startswith("Interrupted.")
    assert "Traceback" not in stopped.err
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").exists(), "a stop saves the step that it was at"
    ran = run_here(capsys, *arguments(small, tmp_path, **LONG))
    assert f"going on after step {step}" in ran.err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected
    assert steps_of(tmp_path / "run") == list(range(1, 81))


@pytest.mark.slow
def test_many_kills_at_random_instants_end_with_bitwise_the_same_weights(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any instant, start-up and saving included."""
    expected = uninterrupted(small, tmp_path, capsys)
    (tmp_path / "probe").mkdir()
    began = time.monotonic()
    subprocess.run([*COMMAND, *arguments(small, tmp_path / "probe", **LONG)], check=True, capture_output=True)
    whole = time.monotonic() - began
    for _ in range(12):
        process = start(arguments(small, tmp_path, **LONG))
        time.sleep(random.uniform(0.3, 1.1) * whole)
        process.kill()
        process.communicate()
    ran = run_here(capsys, *arguments(small, tmp_path, **LONG))
    assert ran.code == 0, ran.err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == expected
    assert steps_of(tmp_path / "run") == list(range(1, 81))
