"""Producing end to end: stores that do not depend on kills, workers and order, and mistakes that cost one line."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from teachers import save_teacher
from terminal import COMMAND, run_here

from logitstore.corpus_files import list_files
from logitstore.errors import ConfigError, LogitStoreError
from logitstore.hub import load_tokenizer
from logitstore.ingest import ingest
from logitstore.manifest import Cell, Column, Manifest
from logitstore.plan import PlanSettings
from logitstore.producer.request import ProduceConfig, TeacherRequest
from logitstore.producer.run import ProduceReport, produce
from logitstore.producer.teacher import Teacher
from logitstore.signals import read_scalars, read_sparse
from logitstore.storage import LocalStorage, Storage
from logitstore.store import Store
from logitstore.token_parts import read_tokens

_CONTEXT = 48


class _Killed(BaseException):
    """What stands for a kill inside this process: nothing catches it."""


@dataclass
class _Progress:
    """Counts what it is told."""

    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_finished: int = 0

    def begin(self, teacher: str, num_blocks: int, num_bytes: int) -> None:
        self.blocks.append(num_blocks)

    def advance(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def finish_block(self, num_bytes: int) -> None:
        self.num_finished += 1


@dataclass(frozen=True)
class _World:
    """A corpus, a teacher and a student's tokenizer, and what an uninterrupted run makes of them."""

    corpus: Path
    teacher: Path
    student: str
    store: Store
    report: ProduceReport

    @property
    def identity(self) -> str:
        return self.report.dataset.manifest.identity

    @property
    def arguments(self) -> list[str]:
        """Of ``logitstore produce``, less the store."""
        return [
            *("--data", str(self.corpus), "--dataset", "d", "--teacher", f"t={self.teacher}"),
            *("--student-tokenizer", self.student, "--select", "threshold:8", "--threads", "1", "--device", "cpu"),
            *("--held-out", "0.1", "--block-bytes", "1024"),
        ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> _World:
    folder = tmp_path_factory.mktemp("world")
    corpus = _write_corpus(folder / "corpus.jsonl", range(30))
    tokenizer = build_bytelevel_tokenizer(folder / "tokenizer", 300)
    teacher = save_teacher(folder / "teacher", tokenizer, vocab_size=320, max_position_embeddings=_CONTEXT)
    student = build_metaspace_tokenizer(folder / "student", 400)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITSTORE_CACHE", str(folder / "cache"))
        store, report = _produce(folder / "store", corpus, [f"t={teacher}"], student)
    return _World(corpus, teacher, student, store, report)


def _write_corpus(path: Path, numbers: Iterator[int] | range) -> Path:
    path.write_text("".join(json.dumps(_row(number)) + "\n" for number in numbers))
    return path


def _row(number: int) -> dict[str, Any]:
    """Texts of up to 150 tokens, several of the teacher's windows; prompts and chats among them."""
    noise = random.Random(number)
    words = "".join(noise.sample(TEXTS[number % 3].split(" "), 5)) + f" {number}. "
    if number % 7 == 3:
        return {"prompt": words, "completion": TEXTS[number % 3]}
    if number % 7 == 5:
        return {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": TEXTS[0]}]}
    return {"text": words * (1 + number % 3) + TEXTS[number % 3]}


def _config(**changes: Any) -> ProduceConfig:
    return ProduceConfig(**{"device": "cpu", "threads": 1, "select": "threshold:8", **changes})


def _produce(
    url: Path,
    corpus: Path | list[Path],
    teachers: list[str],
    student: str | None = None,
    config: ProduceConfig | None = None,
    progress: _Progress | None = None,
) -> tuple[Store, ProduceReport]:
    """Plan and produce, as the command does."""
    config = config or _config()
    store = Store.open_or_create(str(url))
    files = list_files([str(file) for file in (corpus if isinstance(corpus, list) else [corpus])])
    known = store.datasets()
    settings = store.dataset("d").manifest.plan.settings if "d" in known else PlanSettings.for_corpus(0, 0.1, 1024)
    plan = ingest(store, files, settings).plan_digest
    requests = [TeacherRequest.parse(teacher, config) for teacher in teachers]
    students = [] if student is None else [("s", load_tokenizer(student))]
    return store, produce(store, "d", plan, requests, students, config, progress or _Progress())


def _columns(manifest: Manifest, **fields: Any) -> dict[str, Column]:
    return {column.label: column for column in manifest.find("signal", **fields)}


def _recipes(store: Store) -> list[str]:
    return sorted(store.storage.list("recipes"))


def _no_model(*_: object, **__: object) -> Teacher:
    raise AssertionError("a teacher was loaded")


# What a run makes


def test_store_holds_every_token_once(world: _World) -> None:
    manifest = world.report.dataset.manifest
    assert len(manifest.plan.blocks) >= 4
    assert all(column.num_holes == 0 for column in manifest.columns)
    sparse, scalars = (_columns(manifest, signal=signal)["t"] for signal in ("sparse", "scalars"))
    tokens = manifest.column(sparse.template["tokens"])
    assert tokens is not None
    for block in range(len(manifest.plan.blocks)):
        expected = read_tokens(world.store.column_part(tokens, block))
        signal = read_sparse(world.store.column_part(sparse, block))
        columns, scored = read_scalars(world.store.column_part(scalars, block))
        np.testing.assert_array_equal(scored, expected.positions() > 0)
        np.testing.assert_array_equal(signal.rows.scored, scored)
        # Column 0 of a row is the realised token, and both signals say the same of it.
        first = signal.rows.offsets[:-1][scored]
        np.testing.assert_array_equal(signal.rows.ids[first], expected.ids[scored])
        np.testing.assert_array_equal(signal.rows.logprobs()[first], columns["logprob"][scored])
        assert (columns["rank"][scored] < 320).all()
        assert np.isnan(columns["logprob"][~scored]).all()


def test_rows_keep_the_entries_asked_for(world: _World) -> None:
    column = _columns(world.report.dataset.manifest, signal="sparse")["t"]
    assert column.stats["num_entries"] / column.stats["num_scored"] == pytest.approx(8, rel=0.15)


def test_student_tokenizer_is_aligned_whole(world: _World, capsys: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capsys, "inspect", str(world.store.storage.url), "--dataset", "d", "--json")
    found = json.loads(ran.out)
    assert [alignment["coverage"] for alignment in found["alignments"]] == [1.0]
    assert found["manifest_digest"] == world.identity


def test_second_run_does_no_forward(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Teacher, "load", _no_model)
    progress = _Progress()
    url = Path(world.store.storage.url)
    _, report = _produce(url, world.corpus, [f"t={world.teacher}"], world.student, progress=progress)
    assert (report.num_forward_tokens, report.num_scored_blocks, report.dataset.number) == (0, 0, 1)
    assert progress.blocks == [0]
    assert report.dataset.manifest.identity == world.identity


def test_command_says_that_nothing_was_run(
    world: _World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["produce", str(tmp_path / "store"), *world.arguments]
    ran = run_here(capsys, *command)
    assert ran.code == 0, ran.err
    assert "tokens through a teacher" in ran.out
    assert f"manifest {world.identity}" in ran.out
    monkeypatch.setattr(Teacher, "load", _no_model)
    ran = run_here(capsys, *command)
    assert "every block was scored already: no teacher forward was run" in ran.out
    assert f"manifest {world.identity}" in ran.out


def test_reported_tokens_are_those_of_the_forward(world: _World, tmp_path: Path) -> None:
    progress = _Progress()
    _, report = _produce(tmp_path / "store", world.corpus, [f"t={world.teacher}"], progress=progress)
    num_blocks = len(report.dataset.manifest.plan.blocks)
    assert report.num_forward_tokens == progress.num_tokens > 0
    assert report.num_scored_blocks == progress.num_finished == num_blocks
    column = _columns(report.dataset.manifest, signal="scalars")["t"]
    # Windows of long documents repeat some of their context.
    assert column.stats["num_scored"] < progress.num_tokens < 2 * column.stats["num_scored"]


def test_added_signal_runs_again_and_keeps_the_first(world: _World, tmp_path: Path) -> None:
    url = tmp_path / "store"
    _, first = _produce(url, world.corpus, [f"t={world.teacher}"], config=_config(signals=("scalars",)))
    assert [column.template["signal"] for column in first.dataset.manifest.find("signal")] == ["scalars"]
    store, second = _produce(url, world.corpus, [f"t={world.teacher}"])
    assert second.dataset.number == 2
    scalars = _columns(second.dataset.manifest, signal="scalars")["t"]
    assert scalars == _columns(first.dataset.manifest, signal="scalars")["t"]
    assert _columns(second.dataset.manifest, signal="sparse")["t"].num_holes == 0
    assert store.dataset("d").manifest.identity == second.dataset.manifest.identity


def test_signals_do_not_depend_on_which_are_asked_for_together(world: _World, tmp_path: Path) -> None:
    url = tmp_path / "store"
    for signals in (("sparse",), ("scalars",)):
        _, report = _produce(url, world.corpus, [f"t={world.teacher}"], world.student, _config(signals=signals))
    assert report.dataset.manifest.identity == world.identity


def test_two_teachers_stand_side_by_side(world: _World, tmp_path: Path) -> None:
    other = save_teacher(tmp_path / "other", world.teacher.parent / "tokenizer", vocab_size=300, seed=1)
    teachers = [f"t={world.teacher}", f"u={other}"]
    store, report = _produce(tmp_path / "store", world.corpus, teachers, world.student)
    manifest = report.dataset.manifest
    sparse = _columns(manifest, signal="sparse")
    assert sorted(sparse) == ["t", "u"]
    # One tokenizer: one tokens column, one alignment.
    assert len(list(manifest.find("alignment"))) == 1
    assert sparse["t"].template["tokens"] == sparse["u"].template["tokens"]
    assert sparse["t"].cells == _columns(world.report.dataset.manifest, signal="sparse")["t"].cells
    both = [read_scalars(store.column_part(_columns(manifest, signal="scalars")[name], 0))[0] for name in "tu"]
    assert not np.array_equal(both[0]["entropy"], both[1]["entropy"], equal_nan=True)


# Growth


def test_added_documents_score_only_new_blocks(world: _World, tmp_path: Path) -> None:
    url, added = tmp_path / "store", _write_corpus(tmp_path / "added.jsonl", range(100, 104))
    _, before = _produce(url, world.corpus, [f"t={world.teacher}"])
    _, after = _produce(url, [world.corpus, added], [f"t={world.teacher}"])
    known = {block.digest for block in before.dataset.manifest.plan.blocks}
    new = [block for block in after.dataset.manifest.plan.blocks if block.digest not in known]
    assert 0 < len(new) < len(known)
    assert after.num_scored_blocks == len(new)
    assert 0 < after.num_forward_tokens < before.num_forward_tokens / 2
    assert after.dataset.number == 2
    # Theta was settled with the first version: the columns are the same ones, longer.
    for name in ("scalars", "sparse"):
        first, second = (_cells(report.dataset.manifest, name) for report in (before, after))
        assert len({_columns(report.dataset.manifest, signal=name)["t"].id for report in (before, after)}) == 1
        kept = first.keys() & second.keys()
        assert len(kept) >= len(known) - 2
        assert all(first[block] == second[block] for block in kept)


def _cells(manifest: Manifest, name: str) -> dict[str, Cell | None]:
    """By block digest."""
    blocks = [block.digest for block in manifest.plan.blocks]
    return dict(zip(blocks, _columns(manifest, signal=name)["t"].cells, strict=True))


# Kills


def _dying(patch: pytest.MonkeyPatch, number: int) -> None:
    """Kill at the ``number``-th object from now, before it is stored or just after, and store nothing more."""
    tickets = itertools.count(1)

    def dying(original: Callable[[Storage, str, bytes], Any]) -> Callable[[Storage, str, bytes], Any]:
        def store(storage: Storage, name: str, data: bytes) -> Any:
            ticket = next(tickets)  # several threads store at once
            if ticket > number or (ticket == number and number % 2):
                raise _Killed
            result = original(storage, name, data)
            if ticket == number:
                raise _Killed
            return result

        return store

    for name in ("write", "create"):
        patch.setattr(LocalStorage, name, dying(getattr(LocalStorage, name)))


def test_killed_anywhere_and_run_again_is_the_same(world: _World, tmp_path: Path) -> None:
    """One store, killed again and again, each time further on."""
    url, kills = tmp_path / "store", 0
    distances = random.Random(0)
    while True:
        with pytest.MonkeyPatch.context() as patch:
            _dying(patch, distances.randrange(2, 40))
            try:
                store, report = _produce(url, world.corpus, [f"t={world.teacher}"], world.student)
                break
            except _Killed:
                kills += 1
    assert kills > 4
    assert report.dataset.manifest.identity == world.identity
    assert _recipes(store) == _recipes(world.store)


def test_killed_process_and_the_same_command_again_is_the_same(world: _World, tmp_path: Path) -> None:
    url = tmp_path / "store"
    command = [*COMMAND, "produce", str(url), *world.arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while running.poll() is None and len(list(url.glob("recipes/*"))) < 12 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert running.poll() is None, "the run was over before it could be killed"
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert len(list(url.glob("recipes/*"))) < len(_recipes(world.store))
    store, report = _produce(url, world.corpus, [f"t={world.teacher}"], world.student)
    assert report.dataset.manifest.identity == world.identity
    assert _recipes(store) == _recipes(world.store)


def test_two_workers_at_once_make_the_same_store(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = tmp_path / "store"
    command = [*COMMAND, "produce", str(url), *world.arguments, "--json"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], ended
    found = [json.loads(out) for out, _ in ended]
    assert {report["manifest_digest"] for report in found} == {world.identity}
    store = Store.open(str(url))
    assert store.dataset("d").manifest.identity == world.identity
    assert _recipes(store) == _recipes(world.store)
    assert run_here(capsys, "verify", str(url)).code == 0


def _bf16_run(folder: Path, kill_at: int | None, corpus: Path) -> str:
    config = _config(dtype="bf16", deterministic=True)
    teacher = f"t={folder.parent / 'bf16'}"
    if kill_at is not None:
        with pytest.MonkeyPatch.context() as patch:
            _dying(patch, kill_at)
            with pytest.raises(_Killed):
                _produce(folder, corpus, [teacher], config=config)
    _, report = _produce(folder, corpus, [teacher], config=config)
    assert _columns(report.dataset.manifest, signal="sparse")["t"].template["dtype"] == "bf16"
    return report.dataset.manifest.identity


def _save_bf16_teacher(world: _World, folder: Path, hidden_size: int, num_layers: int) -> None:
    save_teacher(
        folder,
        world.teacher.parent / "tokenizer",
        vocab_size=300,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        initializer_range=0.05,
    )


def test_run_that_was_named_no_corpus_keeps_the_growth_of_another(world: _World, tmp_path: Path) -> None:
    teacher, config = f"t={world.teacher}", _config()
    few, more = (_write_corpus(tmp_path / f"{n}.jsonl", range(n)) for n in (8, 16))
    _, before = _produce(tmp_path / "store", few, [teacher])
    store, grown = _produce(tmp_path / "store", more, [teacher])
    old, new = before.dataset.manifest.plan_digest, grown.dataset.manifest.plan_digest
    requests = [TeacherRequest.parse(teacher, config)]
    late = produce(store, "d", old, requests, [], config, _Progress(), replaces_plan=False)
    assert old != new == late.dataset.manifest.plan_digest
    assert late.dataset.manifest.identity == grown.dataset.manifest.identity


def test_killed_bf16_run_of_width_1024_is_bitwise_the_same(world: _World, tmp_path: Path) -> None:
    """At this width, bf16 results do differ between batch shapes."""
    _save_bf16_teacher(world, tmp_path / "bf16", 1024, 2)
    corpus = _write_corpus(tmp_path / "few.jsonl", range(12))
    whole, *killed = (_bf16_run(tmp_path / f"store{n}", n, corpus) for n in (None, 20, 42))
    assert set(killed) == {whole}


# Mistakes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--teacher", "./nowhere"], "nowhere: no such folder"),
        (["--teacher", "{corpus}"], "corpus.jsonl"),
        (["--max-length", "49"], "--max-length 49"),
        (["--max-length", "1"], "--max-length 1"),
        (["--overlap", "48"], "--overlap 48"),
        (["--select", "nucleus:0.9"], "--select 'nucleus:0.9': expected topk:K"),
        (["--select", "threshold:0"], "--select 'threshold:0'"),
        (["--signals", "scalars,sprase"], "--signals 'sprase': expected some of scalars, sparse"),
        (["--signals", ""], "--signals ''"),
        (["--temperatures", "1,2"], "--temperatures other than 1 need --select topk:K"),
        (["--temperatures", "2", "--select", "topk:4"], "--temperatures"),
        (["--temperatures", "x"], "--temperatures 'x': expected numbers"),
        (["--teacher", "{teacher}", "--teacher", "{teacher}"], "two teachers are called 'teacher'"),
        (["--teacher", "a={teacher}", "--teacher", "b={teacher}"], "teachers 'a' and 'b' are the same model"),
        (["--data", "./nowhere/*.jsonl"], "nowhere"),
        (["--device", "cuda:99"], "--device cuda:99: not usable here"),
        (["--student-tokenizer", "./nowhere"], "nowhere: no such folder"),
        (["--dataset", "a/b"], "dataset name 'a/b'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistake_costs_one_line_and_no_forward(
    options: list[str],
    expected: str,
    world: _World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Teacher, "load", _no_model)
    options = [option.format(teacher=world.teacher, corpus=world.corpus) for option in options]
    given = {"--data": str(world.corpus), "--dataset": "d", "--teacher": str(world.teacher)}
    rest = [word for name, value in given.items() if name not in options for word in (name, value)]
    assert expected in run_here(capsys, "produce", str(tmp_path / "store"), *rest, *options).refusal()


def test_new_dataset_without_data_refused(world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["produce", str(tmp_path / "store"), "--dataset", "new", "--teacher", str(world.teacher)]
    assert "--data" in run_here(capsys, *arguments).refusal()


def test_tokenizer_larger_than_model_refused(world: _World, tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "narrow", world.teacher.parent / "tokenizer", vocab_size=200)
    with pytest.raises(LogitStoreError, match=r"tokenizer has 300 tokens, its model only 200"):
        TeacherRequest.parse(str(folder), _config())


def test_teacher_without_tokenizer_refused(tmp_path: Path) -> None:
    with pytest.raises(LogitStoreError, match="tokenizer"):
        TeacherRequest.parse(str(save_teacher(tmp_path / "bare")), _config())


def test_names_given_twice_refused_in_python(world: _World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two teachers are called 't'"):
        _produce(tmp_path / "store", world.corpus, [f"t={world.teacher}"] * 2)


def test_temperatures_in_any_order_are_one_recipe() -> None:
    first, second = (_config(select="topk:4", temperatures=each) for each in ((2.0, 1.0, 0.5), (0.5, 1.0, 2.0)))
    assert first.temperatures == second.temperatures == (1.0, 0.5, 2.0)


def test_name_and_revision_are_read_off_a_teacher(world: _World) -> None:
    named = TeacherRequest.parse(f"big={world.teacher}", _config())
    plain = TeacherRequest.parse(str(world.teacher), _config(max_length=20))
    assert (named.name, plain.name) == ("big", "teacher")
    assert named.fingerprint == plain.fingerprint
    assert (named.windows.length, plain.windows.length, plain.windows.overlap) == (_CONTEXT, 20, 5)


def test_threads_are_part_of_a_deterministic_recipe_only(world: _World, tmp_path: Path) -> None:
    found = []
    for number, deterministic in enumerate((True, False)):
        config = _config(deterministic=deterministic, signals=("scalars",))
        _, report = _produce(tmp_path / str(number), world.corpus, [f"t={world.teacher}"], config=config)
        found.append(_columns(report.dataset.manifest)["t"].template.get("deterministic"))
    assert found == [{"device": "cpu", "batch_tokens": "512", "threads": "1"}, None]
    assert torch.get_num_threads() == 1
