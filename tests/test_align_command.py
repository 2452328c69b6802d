"""``logitstore align``: the same columns as ``produce --student-tokenizer`` makes, on CPUs, killed and raced."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import build_bytelevel_tokenizer
from click.testing import CliRunner
from small_store import THETA, Silent, SmallStore
from terminal import COMMAND, run_here

from logitstore.cli.main import cli
from logitstore.hub import load_tokenizer
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import produce
from logitstore.store import Store
from logitstore.verification import verify


@pytest.fixture
def copied(small: SmallStore, tmp_path: Path) -> SmallStore:
    """The small store, to be changed at will."""
    return _copy(small, tmp_path / "store")


@pytest.fixture(scope="module")
def expected(small: SmallStore, tmp_path_factory: pytest.TempPathFactory) -> SmallStore:
    """The small store with the tokenizer ``stranger`` added by ``produce``."""
    store = _copy(small, tmp_path_factory.mktemp("expected") / "store")
    config = ProduceConfig(select=f"threshold:{THETA}", device="cpu", threads=1, max_length=256)
    requests = [TeacherRequest.parse(f"{name}={path}", config) for name, path in small.teachers.items()]
    students = [("stranger", load_tokenizer(small.stranger))]
    plan = store.version.manifest.plan_digest
    report = produce(store.store, "mixed", plan, requests, students, config, Silent())
    assert report.num_forward_tokens == 0
    return store


def _copy(small: SmallStore, folder: Path) -> SmallStore:
    shutil.copytree(small.url, folder)
    return replace(small, url=str(folder))


def _arguments(store: SmallStore, tokenizer: str | None = None, *options: str) -> list[str]:
    named = tokenizer or store.stranger
    return ["align", store.url, "--dataset", "mixed", "--student-tokenizer", named, *options]


def _align(store: SmallStore, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, _arguments(store, None, "--json", *options))
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def _recipes(store: SmallStore) -> list[str]:
    return sorted(path.name for path in Path(store.url).glob("recipes/*.json"))


def test_align_makes_the_dataset_that_produce_makes(copied: SmallStore, expected: SmallStore) -> None:
    before = copied.version.number
    found = _align(copied)
    assert found["version"] == before + 1
    assert found["manifest_digest"] == expected.version.manifest.identity == copied.version.manifest.identity
    assert _recipes(copied) == _recipes(expected)
    assert found["num_filled_blocks"] == len(copied.version.manifest.plan.blocks)
    (alignment,) = found["alignments"]
    assert (alignment["teacher_tokenizer"], alignment["student_tokenizer"]) == ("big", "stranger")
    assert alignment["coverage"] == 1.0
    assert (alignment["num_unproven_documents"], alignment["num_unproven_tokens"]) == (0, 0)
    assert verify(copied.store).faults == ()


def test_align_again_makes_no_version(copied: SmallStore) -> None:
    first = _align(copied)
    result = CliRunner().invoke(cli, _arguments(copied))
    assert result.exit_code == 0
    assert "every block was aligned already" in result.output
    assert "alignment big -> stranger: 100.00% of the student's tokens in" in result.output
    assert f"version {first['version']}: manifest {first['manifest_digest']}" in result.output
    assert copied.version.number == first["version"]


def test_align_under_another_name_renames_nothing(copied: SmallStore, tmp_path: Path) -> None:
    first = _align(copied)
    shutil.copytree(copied.stranger, tmp_path / "renamed")
    result = CliRunner().invoke(cli, _arguments(copied, str(tmp_path / "renamed"), "--json"))
    assert json.loads(result.output)["version"] == first["version"]


def test_align_says_that_a_teachers_own_tokenizer_needs_nothing(copied: SmallStore) -> None:
    before = copied.version.number
    result = CliRunner().invoke(cli, _arguments(copied, copied.tokenizer))
    assert "big -> tokenizer: the same tokens, nothing to align" in result.output
    assert copied.version.number == before


def test_align_takes_several_tokenizers(copied: SmallStore, expected: SmallStore) -> None:
    found = _align(copied, "--student-tokenizer", copied.other)
    assert {alignment["student_tokenizer"] for alignment in found["alignments"]} == {"stranger", "other"}
    assert found["manifest_digest"] == expected.version.manifest.identity


def test_align_imports_no_torch(copied: SmallStore) -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from logitstore.cli.main import main\n"
        f"main({_arguments(copied)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "filled" in done.stdout


def test_killed_at_random_instants_and_run_again_is_the_same(copied: SmallStore, expected: SmallStore) -> None:
    generator, before, kills = random.Random(0), len(_recipes(copied)), 0
    for share in (0.2, 0.6):
        running = subprocess.Popen(
            [*COMMAND, *_arguments(copied)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wanted = before + int(share * (len(_recipes(expected)) - before))
        while running.poll() is None and len(_recipes(copied)) < wanted:
            time.sleep(0.002)
        time.sleep(generator.random() * 0.02)
        if running.poll() is None:
            os.kill(running.pid, signal.SIGKILL)
            kills += 1
        running.wait()
    assert kills > 0
    committed = set(_recipes(copied))
    found = _align(copied)
    assert found["manifest_digest"] == expected.version.manifest.identity
    assert committed < set(_recipes(copied)) or found["num_filled_blocks"] == 0
    assert found["num_filled_blocks"] < len(expected.version.manifest.plan.blocks)
    assert _recipes(copied) == _recipes(expected)
    assert verify(copied.store).faults == ()


def test_two_processes_at_once_make_the_same_dataset(copied: SmallStore, expected: SmallStore) -> None:
    command = [*COMMAND, *_arguments(copied, None, "--json")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    assert {json.loads(out)["manifest_digest"] for out, _ in ended} == {expected.version.manifest.identity}
    assert copied.version.number == expected.version.number
    assert _recipes(copied) == _recipes(expected)


def test_interrupted_align_says_so_and_goes_on(copied: SmallStore, expected: SmallStore) -> None:
    before = len(_recipes(copied))
    running = subprocess.Popen(
        [*COMMAND, *_arguments(copied)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while running.poll() is None and len(_recipes(copied)) == before:
        time.sleep(0.002)
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130, error
    assert "Interrupted." in error
    assert "Traceback" not in error
    assert _align(copied)["manifest_digest"] == expected.version.manifest.identity


def test_align_refuses_in_one_line(copied: SmallStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = build_bytelevel_tokenizer(tmp_path / "plain", 300, chat_template=None)
    assert "has no chat template" in run_here(capsys, *_arguments(copied, plain)).refusal()
    assert "nowhere: no such folder" in run_here(capsys, *_arguments(copied, "./nowhere")).refusal()
    elsewhere = ["align", str(tmp_path / "none"), "--dataset", "mixed", "--student-tokenizer", plain]
    assert "no store here" in run_here(capsys, *elsewhere).refusal()
    unknown = ["align", copied.url, "--dataset", "other", "--student-tokenizer", plain]
    assert "other" in run_here(capsys, *unknown).refusal()


def test_align_takes_a_chat_template_from_a_file(copied: SmallStore, tmp_path: Path) -> None:
    plain = build_bytelevel_tokenizer(tmp_path / "plain", 300, chat_template=None)
    template = tmp_path / "template.jinja"
    template.write_text((Path(copied.stranger) / "chat_template.jinja").read_text())
    result = CliRunner().invoke(cli, _arguments(copied, plain, "--chat-template", str(template)))
    assert result.exit_code == 0, result.output
    assert "100.00% of the student's tokens" in result.output


def test_align_asks_for_a_teacher(copied: SmallStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(copied.url)

    def without_signals(current: Any) -> Any:
        return replace(current, columns=tuple(column for column in current.columns if column.kind != "signal"))

    store.publish("mixed", without_signals)
    refusal = run_here(capsys, *_arguments(copied)).refusal()
    assert "no teacher's signal to align with" in refusal
    assert "logitstore produce" in refusal
