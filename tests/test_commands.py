"""The command line but for training: help, configuration files, plan, produce, inspect and verify."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from small_store import SmallStore, write_student_config
from terminal import run_apart, run_here

import logitstore
from logitstore.cli import progress
from logitstore.cli.config_file import config_option
from logitstore.cli.main import cli
from logitstore.cli.tokenizer_options import label_of
from logitstore.errors import ConfigError

COMMANDS = ("plan", "produce", "align", "train", "inspect", "verify", "copy", "dataset", "gc")

# Help, and errors before any work


@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_is_there(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments, prog_name="logitstore")
    assert result.exit_code == 0
    assert result.output.startswith("Usage: logitstore")


def test_help_of_all_commands_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from click.testing import CliRunner\nfrom logitstore.cli.main import cli\n"
        f"for name in {COMMANDS!r}: assert CliRunner().invoke(cli, [name, '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'zarr', 'numba', 'pyarrow', 'numpy'} & sys.modules.keys()\n"
        "print(*heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_version_is_the_packages() -> None:
    from importlib.metadata import version

    result = CliRunner().invoke(cli, ["--version"])
    assert version("logitstore") in result.output


def test_no_command_shows_the_help() -> None:
    ran = run_apart([])
    assert ran.code == 2
    assert "Commands:" in ran.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["produse"], "produce"),
        (["inspect"], "STORE"),
        (["inspect", "s", "--datset", "x"], "--dataset"),
        (["train", "s", "--temperatur", "x"], "--temperature"),
        (["verify", "s", "--jsn"], "--json"),
    ],
)
def test_a_misspelt_command_line_is_one_line_with_the_nearest_word(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in run_here(capsys, *arguments).refusal()


def test_errors_are_one_line_and_code_2_in_a_process_of_their_own(tmp_path: Path) -> None:
    message = run_apart(["inspect", str(tmp_path / "nothing")]).refusal()
    assert "no store here" in message


def test_a_file_system_that_refuses_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/some/where")

    monkeypatch.setattr("logitstore.store.Store.open", refuse)
    assert run_here(capsys, "inspect", "s").refusal() == "/some/where: Permission denied"


# Configuration files


def parse(tmp_path: Path, config: str, *arguments: str) -> dict[str, Any]:
    """What a command with options of all kinds makes of a configuration and a command line."""
    found: dict[str, Any] = {}

    @click.command()
    @click.argument("store", required=False)
    @click.option("--learning-rate", type=float, default=1.0)
    @click.option("--teacher", multiple=True)
    @click.option("--teacher-weights")
    @click.option("--signals")
    @click.option("--resume", is_flag=True)
    @click.option("--bf16/--no-bf16", default=None)
    @config_option()
    def command(**values: Any) -> None:
        found.update(values)

    (tmp_path / "c.yaml").write_text(config)
    command.main(["--config", str(tmp_path / "c.yaml"), *arguments], standalone_mode=False)
    return found


def test_config_sets_options_and_the_command_line_wins(tmp_path: Path) -> None:
    config = "learning-rate: 3e-4\nresume: true\nbf16: false\nstore: here\n"
    found = parse(tmp_path, config)
    assert (found["learning_rate"], found["resume"], found["bf16"], found["store"]) == (3e-4, True, False, "here")
    found = parse(tmp_path, config, "there", "--learning-rate", "2", "--bf16")
    assert (found["learning_rate"], found["resume"], found["bf16"], found["store"]) == (2.0, True, True, "there")


def test_config_takes_underscores_lists_and_mappings(tmp_path: Path) -> None:
    found = parse(
        tmp_path,
        "learning_rate: 2\nteacher: [a, b=c]\nsignals: [scalars, sparse]\nteacher_weights: {a: 0.7, b: 0.3}\n",
    )
    assert found["learning_rate"] == 2.0
    assert found["teacher"] == ("a", "b=c")
    assert found["signals"] == "scalars,sparse"
    assert found["teacher_weights"] == "a=0.7,b=0.3"
    assert parse(tmp_path, "teacher: {big: /models/big}")["teacher"] == ("big=/models/big",)
    assert parse(tmp_path, "teacher: one")["teacher"] == ("one",)
    assert parse(tmp_path, "teacher: null\nsignals: null")["signals"] is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("learning-rat: 1", r"unknown key 'learning-rat'; did you mean 'learning-rate'\?"),
        ("config: x", "unknown key 'config'"),
        ("- a", "expected a mapping of option names to values, found list"),
        ("", "found NoneType"),
        ("a: [", "not YAML"),
    ],
)
def test_config_refuses_what_it_does_not_know(tmp_path: Path, config: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(tmp_path, config)


def test_config_errors_are_one_line(small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("dataset: mixed\noutput: o\nstudent: s\nmax-steps: many\n")
    assert "'many'" in run_here(capsys, "train", small.url, "--config", str(config)).refusal()
    config.write_text("dataset: mixed\nmax-stebs: 3\n")
    assert "did you mean 'max-steps'?" in run_here(capsys, "train", small.url, "--config", str(config)).refusal()
    config.write_bytes(b"\xff\xfe\x00")
    assert "c.yaml" in run_here(capsys, "train", small.url, "--config", str(config)).refusal()
    missing = str(tmp_path / "none.yaml")
    assert "none.yaml" in run_here(capsys, "train", small.url, "--config", missing).refusal()


def test_train_runs_from_a_configuration(small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "dataset": "mixed",
        "output": str(tmp_path / "run"),
        "student-config": write_student_config(tmp_path / "student.json"),
        "selection": "topk:6",
        "objective": {"kl": 0.9, "ce": 0.1},
        "teacher-weights": {"big": 2, "small": 1},
        "seq_length": 64,
        "batch_tokens": 192,
        "max-steps": 50,
        "threads": 1,
        "json": True,
    }
    (tmp_path / "c.json").write_text(json.dumps(config))  # JSON is YAML
    ran = run_here(capsys, "train", small.url, "--config", str(tmp_path / "c.json"), "--max-steps", "2")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["step"] == 2


# Progress


def test_progress_in_a_log_is_a_plain_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    with progress.TrainBar() as bar:
        bar.begin(10, 20)
        bar.advance(11, 500, 2.5)
        bar.advance(12, 500, 2.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("training: 20%, ")
    assert "step 12/20 loss 2.2500" in lines[1]
    assert lines[1].endswith("min left")


def test_progress_is_silent_between_lines_and_when_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for quiet in (False, True):
        monkeypatch.setattr(progress, "LOG_SECONDS", 0.0 if quiet else 30.0)
        with progress.ProduceBar(quiet=quiet) as bar:
            bar.begin("big", 2, 100)
            bar.advance(50)
            bar.finish_block(50)
    assert capsys.readouterr().err == ""


def test_progress_rate_is_that_of_the_tokens_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress.TrainBar(quiet=True) as bar:
        bar.begin(10, 20)
        bar.advance(11, 500, 2.5)
        bar.advance(12, 500, 2.5)
        assert bar._num_tokens == 1000


# Plan and produce


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"Document {n} of a few, and no more."}) + "\n" for n in range(9)))
    return path


def test_plan_writes_a_plan_and_a_second_time_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", str(tmp_path / "store"), "--data", str(corpus), "--dataset", "few"]
    ran = run_here(capsys, *command)
    assert ran.code == 0, ran.err
    assert "9 documents in " in ran.out
    assert "dataset 'few' version 1: manifest " in ran.out
    ran = run_here(capsys, *command)
    assert "corpus unchanged, not read again" in ran.out
    assert "version 1" in ran.out
    found = json.loads(run_here(capsys, "inspect", str(tmp_path / "store"), "--dataset", "few", "--json").out)
    assert (found["num_documents"], found["num_tokens"], found["teachers"]) == (9, 0, [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": "/nowhere/*.jsonl"}, "/nowhere/*.jsonl"),
        ({"data": None}, "--data: name the corpus"),
        ({"dataset": "a/b"}, "dataset name 'a/b'"),
        ({"held-out": "2"}, "--held-out"),
        ({"on-error": "ignore"}, "--on-error"),
    ],
)
def test_plan_refuses_in_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str | None], expected: str
) -> None:
    options = {"data": str(corpus), "dataset": "few", **changes}
    arguments = [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]
    assert expected in run_here(capsys, "plan", str(tmp_path / "store"), *arguments).refusal()


def test_produce_scores_once_and_train_says_what_is_missing_before(
    small: SmallStore, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")
    run_here(capsys, "plan", store, "--data", str(corpus), "--dataset", "few")
    student = write_student_config(tmp_path / "student.json")
    train = ["train", store, "--dataset", "few", "--output", str(tmp_path / "run"), "--student-config", student]
    assert "has no teacher yet" in run_here(capsys, *train).refusal()
    produce = ["produce", store, "--dataset", "few", "--teacher", small.teachers["small"], "--threads", "1"]
    ran = run_here(capsys, *produce)
    assert ran.code == 0, ran.err
    assert "tokens through a teacher" in ran.out
    assert "Loading weights" not in ran.err
    assert "no teacher forward was run" in run_here(capsys, *produce).out


def test_tokenizers_are_called_by_the_name_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "mine@v2"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for text in (str(folder), "~/mine@v2", f"{folder}/", str(folder / "tokenizer.json")):
        assert label_of(text) == "mine@v2"
    assert label_of("org/name@main") == "org/name@main"


# Inspect and verify


def test_inspect_shows_all_datasets(small: SmallStore, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capsys, "inspect", small.url)
    assert "mixed (version 2): 50 documents" in ran.out
    found = json.loads(run_here(capsys, "inspect", small.url, "--json").out)
    assert found["datasets"]["mixed"]["num_documents"] == 50


def test_inspect_shows_a_dataset_with_sizes_and_paths_that_open(
    small: SmallStore, capsys: pytest.CaptureFixture[str]
) -> None:
    import zarr

    ran = run_here(capsys, "inspect", small.url, "--dataset", "mixed")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"mixed version 2, manifest {small.version.manifest.identity}"
    paths = [line.split("'")[1] for line in lines if line.startswith("zarr.open_group(")]
    assert len(paths) == len(small.version.manifest.columns)
    assert all(zarr.open_group(path, mode="r").attrs["logitstore"]["kind"] for path in paths)
    assert "bytes/token" in ran.out


def test_inspect_prints_the_promised_json(small: SmallStore, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capsys, "inspect", small.url, "--dataset", "mixed", "--json")
    assert ran.err == ""
    found = json.loads(ran.out)
    assert found["manifest_digest"] == small.version.manifest.identity
    assert found["num_documents"] == 50
    assert found["num_tokens"] > 3000
    assert found["bytes_per_token"].keys() == {"text", "tokens", "signals", "alignments", "total"}
    parts = [value for name, value in found["bytes_per_token"].items() if name != "total"]
    assert found["bytes_per_token"]["total"] == pytest.approx(sum(parts))
    assert {teacher["name"] for teacher in found["teachers"]} == {"big", "small"}
    (alignment,) = found["alignments"]
    assert alignment["student_tokenizer"] == "other"
    assert 0 < alignment["coverage"] <= 1
    assert alignment["num_spans"] > 0


def test_inspect_shows_a_document_as_its_teacher_saw_it(small: SmallStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", small.url, "--dataset", "mixed", "--document", "3", "--teacher", "big"]
    text = run_here(capsys, *command).out
    found = json.loads(run_here(capsys, *command, "--json").out)
    assert found["teacher"] == "big"
    first, second = found["tokens"][:2]
    assert (first["logprob"], first["candidates"]) == (None, [])
    assert second["logprob"] < 0
    assert any(candidate[0] == second["text"] for candidate in second["candidates"])
    assert f"'{second['text']}'" in text
    assert "as big saw it" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dataset", "mixed", "--document", "50"], "documents 0 to 49"),
        (["--document", "1"], "name its --dataset"),
        (["--dataset", "mixed", "--document", "1", "--teacher", "tall"], "teachers: "),
        (["--dataset", "few"], "there are: mixed"),
        (["--dataset", "mixed", "--dataset-version", "7"], "no version 7"),
    ],
)
def test_inspect_refuses_in_one_line(
    small: SmallStore, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in run_here(capsys, "inspect", small.url, *arguments).refusal()


def test_verify_exits_with_0_while_every_digest_holds_and_1_with_each_damaged_object_named(
    small: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = shutil.copytree(small.url, tmp_path / "store")
    ran = run_here(capsys, "verify", str(store))
    assert (ran.code, ran.err) == (0, "")
    assert "every digest holds" in ran.out
    damaged = sorted(path for path in (store / "parts").rglob("c/0/0"))[:2]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    ran = run_here(capsys, "verify", str(store))
    assert ran.code == 1
    assert all(str(path) in ran.out for path in damaged)
    assert "2 damaged" in ran.out
    ran = run_here(capsys, "verify", str(store), "--json")
    assert ran.code == 1
    assert len(json.loads(ran.out)["faults"]) == 2


def test_open_is_the_python_of_it(small: SmallStore) -> None:
    assert list(logitstore.open(small.url).datasets()) == ["mixed"]
