"""Selections from the command line to stored rows, and what a trainer makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import TEXTS, build_bytelevel_tokenizer
from teachers import save_teacher
from terminal import run_here

from logitstore.consumer.data import TrainingData
from logitstore.consumer.rows import partition_rows
from logitstore.consumer.stream import Stream, StreamConfig
from logitstore.errors import ConfigError
from logitstore.inspection import describe_dataset, view_document
from logitstore.manifest import Column
from logitstore.producer.request import ProduceConfig
from logitstore.signals import SparseSignal, read_scalars, read_sparse
from logitstore.sparse import NOT_STORED, coarse_quanta
from logitstore.store import Store
from logitstore.text_parts import read_documents_of
from logitstore.token_parts import TokenBlock, read_tokens
from logitstore.tokenizer import Tokenizer


@dataclass(frozen=True)
class _World:
    folder: Path
    teacher: Path
    corpus: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> _World:
    folder = tmp_path_factory.mktemp("selections")
    tokenizer = build_bytelevel_tokenizer(folder / "tokenizer", 300)
    teacher = save_teacher(folder / "teacher", tokenizer, vocab_size=320)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{n}. {TEXTS[n % len(TEXTS)]}"}) + "\n" for n in range(6)))
    return _World(folder, teacher, corpus)


@dataclass(frozen=True)
class _Block:
    """The first block as it was stored."""

    store: Store
    sparse: Column
    scalars: Column
    tokens: TokenBlock
    documents: list[str]

    @property
    def signal(self) -> SparseSignal:
        return read_sparse(self.store.column_part(self.sparse, 0))

    def columns(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return read_scalars(self.store.column_part(self.scalars, 0))


def _produce(world: _World, url: Path, capsys: pytest.CaptureFixture[str], *options: str) -> _Block:
    ran = run_here(
        capsys,
        *("produce", str(url), "--data", str(world.corpus), "--dataset", "d", "--teacher", f"t={world.teacher}"),
        *("--device", "cpu", "--threads", "1", "--held-out", "0", "--json", *options),
    )
    assert ran.code == 0, ran
    store = Store.open(str(url))
    manifest = store.dataset("d").manifest
    (sparse,), (scalars,) = (list(manifest.find("signal", signal=name)) for name in ("sparse", "scalars"))
    tokens = manifest.column(sparse.template["tokens"])
    assert tokens is not None
    documents = read_documents_of(store.column_part(next(manifest.find("text")), 0))
    block = read_tokens(store.column_part(tokens, 0))
    return _Block(store, sparse, scalars, block, [document.digest().hex() for document in documents])


@pytest.mark.parametrize(
    ("select", "name", "draw_weight"),
    [
        ("topp:0.8,max=10", "topp:0.8,max=10", None),
        ("sample:20", "sample:20", 0.05),
        ("topk:3+sample:9", "sample:9+topk:3", 1 / 9),
        ("threshold:0.02+topk:3", "threshold:0.02+topk:3", 0.02),
    ],
)
def test_selections_are_stored_as_asked(
    select: str,
    name: str,
    draw_weight: float | None,
    world: _World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    block = _produce(world, tmp_path / "store", capsys, "--select", select)
    signal, rows = block.signal, block.signal.rows
    assert signal.draw_weight == draw_weight
    assert rows.sampled.any() == (draw_weight is not None)
    columns, scored = block.columns()
    entry_rows = np.repeat(np.arange(rows.num_rows), rows.counts)
    assert (rows.ids[rows.offsets[:-1][scored]] == block.tokens.ids[scored]).all()
    for row in np.flatnonzero(scored):
        mine = entry_rows == row
        certain = rows.ids[mine & ~rows.sampled]
        assert {block.tokens.ids[row], int(columns["argmax_id"][row])} <= set(certain.tolist())
        assert len(set(rows.ids[mine].tolist())) == mine.sum()
        order = list(zip(rows.quanta[mine][1:].tolist(), rows.ids[mine][1:].tolist(), strict=True))
        assert order == sorted(order)
    # What students do not need is not kept: log-probs of what was drawn.
    assert ((rows.quanta == NOT_STORED) == rows.sampled).all()
    described = describe_dataset(block.store, block.store.dataset("d"))
    assert f"sparse {name}" in described["teachers"][0]["signals"]


def test_union_with_a_budget_is_drawn_at_the_theta_that_it_has_alone(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, union = (
        _produce(world, tmp_path / select, capsys, "--select", select)
        for select in ("threshold:6", "topk:3+threshold:6")
    )
    assert union.signal.draw_weight == alone.signal.draw_weight
    assert union.signal.rows.counts.sum() > alone.signal.rows.counts.sum()


def test_sampled_logprobs_and_their_step_are_options(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--select", "sample:20", "--seed", "3")
    without = _produce(world, tmp_path / "without", capsys, *options).signal.rows
    coarse = _produce(world, tmp_path / "with", capsys, *options, "--sampled-logprobs", "--logprob-step", "0.25")
    rows = coarse.signal.rows
    assert rows.step_nats == 0.25
    assert (coarse.sparse.template["step_nats"], coarse.sparse.template["sampled_logprobs"]) == ("0.25", True)
    assert not np.isnan(rows.logprobs()).any()
    # The draws are the same ones; only their order among the unlikely differs.
    for row in np.flatnonzero(rows.scored):
        kept = [found.slice_rows(row, row + 1) for found in (rows, without)]
        sets = [set(zip(found.ids.tolist(), found.draws.tolist(), strict=True)) for found in kept]
        assert sets[0] == sets[1]
        assert abs(kept[0].logprobs()[0] - kept[1].logprobs()[0]) <= (0.25 + 0.1) / 2 + 1e-5


def test_raw_log_z_is_a_column_on_request(world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = _produce(world, tmp_path / "plain", capsys).columns()
    columns, scored = _produce(world, tmp_path / "log_z", capsys, "--log-z").columns()
    assert list(columns) == [*plain, "log_z"]
    assert np.isfinite(columns["log_z"][scored]).all()
    assert columns["log_z"][scored].std() > 0
    starts = [np.exp(columns[f"starts@{name}"][scored]) for name in ("space", "punctuation", "end")]
    assert all((mass > 0).all() and (mass < 1.06).all() for mass in starts)


def test_given_ids_are_stored_where_they_were_given(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _produce(world, tmp_path / "first", capsys, "--select", "topk:1")
    documents, begins, ends = first.documents, first.tokens.begins, first.tokens.ends
    rng = np.random.default_rng(0)
    given = {
        (number, position): rng.choice(320, 4, replace=False).tolist()
        for number in range(0, len(documents), 2)
        for position in range(1, int(ends[number] - begins[number]), 3)
    }
    url = tmp_path / "given.parquet"
    places = list(given)
    table = {
        "document": [documents[n] for n, _ in places],
        "position": [p for _, p in places],
        "ids": list(given.values()),
    }
    pq.write_table(pa.table(table), url)
    block = _produce(world, tmp_path / "second", capsys, "--select", f"given:{url}", "--temperatures", "1,2")
    rows, (columns, _) = block.signal.rows, block.columns()
    assert block.sparse.template["selection"]["policy"] == "given"
    for number in range(len(documents)):
        for position in range(1, int(ends[number] - begins[number])):
            row = int(begins[number]) + position
            expected = {*given.get((number, position), []), int(block.tokens.ids[row]), int(columns["argmax_id"][row])}
            assert set(rows.ids[rows.offsets[row] : rows.offsets[row + 1]].tolist()) == expected


def test_given_ids_outside_the_vocabulary_cost_no_scoring(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = tmp_path / "given.parquet"
    pq.write_table(pa.table({"document": ["ab" * 32], "position": [1], "ids": [[320]]}), url)
    ran = run_here(
        capsys,
        *("produce", str(tmp_path / "store"), "--data", str(world.corpus), "--dataset", "d"),
        *("--teacher", f"t={world.teacher}", "--select", f"given:{url}"),
    )
    assert "token id 320 is outside the vocabulary of t, which has 320 tokens" in ran.refusal()
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--select", "given:nowhere.parquet"], "cannot read a Parquet file there"),
        (["--select", "sample:9+threshold:12"], "two parts sample"),
        (["--select", "sample:9", "--temperatures", "1,2"], "--temperatures other than 1 need"),
        (["--logprob-step", "0.001"], "--logprob-step 0.001: expected nats, 0.01 to 1"),
        (["--logprob-step", "nan"], "--logprob-step nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_cannot_be_are_refused(
    options: list[str], expected: str, world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["produce", str(tmp_path / "store"), "--data", str(world.corpus), "--dataset", "d"]
    assert expected in run_here(capsys, *arguments, "--teacher", str(world.teacher), *options).refusal()


def test_selections_are_refused_before_a_teacher_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="two parts sample"):
        ProduceConfig(select="sample:9+threshold:12")


def test_seeds_of_more_than_64_bits_are_refused(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"--seed .*: expected a whole number from 0 to 2\^64 - 1"):
        ProduceConfig(seed=1 << 64)
    _produce(world, tmp_path / "store", capsys, "--seed", str(2**64 - 1))
    arguments = ["produce", str(tmp_path / "store"), "--dataset", "d", "--teacher", str(world.teacher)]
    ran = run_here(capsys, *arguments, "--seed", str(2**64))
    assert ran.code == 2
    assert "Traceback" not in ran.err


def test_documents_are_shown_without_the_logprobs_of_samples(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = _produce(world, tmp_path / "store", capsys, "--select", "sample:20")
    view = view_document(block.store, block.store.dataset("d"), 0)
    candidates = [candidate for token in view.tokens for candidate in token.candidates]
    assert any(logprob is None for _, logprob, _ in candidates)
    assert all((logprob is None) == sampled for _, logprob, sampled in candidates)
    assert run_here(capsys, "inspect", str(tmp_path / "store"), "--dataset", "d", "--document", "0").code == 0


def test_partitions_need_the_logprobs_of_all_that_is_listed() -> None:
    ids: Any = torch.tensor([[3, 5, -1]])
    with pytest.raises(ConfigError, match="--sampled-logprobs"):
        partition_rows(ids, torch.tensor([[-0.1, float("nan"), 0.0]]), torch.tensor([-3.0]))
    rows = partition_rows(ids, torch.tensor([[-0.1, -2.5, float("nan")]]), torch.tensor([-3.0]))
    rows.validate()


def test_trainer_takes_draws_for_weights(world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = _produce(world, tmp_path / "store", capsys, "--select", "topk:3+sample:9")
    student = Tokenizer.from_folder(str(world.folder / "tokenizer"))
    version = block.store.dataset("d")
    data = TrainingData.open(block.store, version, student, selection="sample+topk")
    with pytest.raises(ConfigError, match="drawn at temperature 1"):
        data.check_temperature(2.0)
    with pytest.raises(ConfigError, match=r"it has: sample:9\+topk:3"):
        TrainingData.open(block.store, version, student, selection="sample")
    stream = Stream(data, StreamConfig(sequence_length=64, batch_tokens=256, seed=0), 1.0)
    rows = stream.collate(next(iter(stream))).teachers[0].rows
    rows.validate()
    assert rows.is_sample
    weights = rows.log_masses_NK.exp()
    ninths = weights * 9
    drawn = (rows.ids_NK >= 0) & ((ninths - ninths.round()).abs() < 1e-5) & (ninths.round() > 0)
    assert drawn.any(-1).float().mean() > 0.5
    assert weights.sum(-1).mean() == pytest.approx(1.0, abs=0.1)


def test_tail_step_rounds_unlikely_tokens_and_no_others(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _produce(world, tmp_path / "plain", capsys, "--select", "topk:40")
    coarse = _produce(world, tmp_path / "coarse", capsys, "--select", "topk:40", "--tail-step", "0.8")
    assert coarse.sparse.template["tail_step_nats"] == "0.8"
    assert "tail_step_nats" not in plain.sparse.template
    assert coarse.signal.tail_step_nats == 0.8
    expected = coarse_quanta(0.1, 0.8)
    for row in np.flatnonzero(plain.signal.rows.scored):
        fine, found = (block.signal.rows.slice_rows(row, row + 1) for block in (plain, coarse))
        wanted = dict(zip(fine.ids.tolist(), expected[fine.quanta].tolist(), strict=True))
        assert dict(zip(found.ids.tolist(), found.quanta.tolist(), strict=True)) == wanted
    assert len(np.unique(coarse.signal.rows.quanta)) < len(np.unique(plain.signal.rows.quanta))


def test_portable_run_makes_the_same_dataset_with_standard_codecs(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _produce(world, tmp_path / "plain", capsys, "--select", "threshold:6")
    portable = _produce(world, tmp_path / "portable", capsys, "--select", "threshold:6", "--portable")
    identities = {block.store.dataset("d").manifest.identity for block in (plain, portable)}
    assert len(identities) == 1
    metadata = [path.read_text() for path in (tmp_path / "portable").glob("**/sparse/zarr.json")]
    assert metadata
    assert not any("logitstore." in text for text in metadata)
    assert all(
        "logitstore.sparse_rows" in path.read_text() for path in (tmp_path / "plain").glob("**/sparse/zarr.json")
    )
