"""Signals on classes shared with a student's vocabulary: ``produce --signals sparse@TOKENIZER``."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import TEXTS, build_bytelevel_tokenizer, build_metaspace_tokenizer
from teachers import build_model, random_documents, save_teacher, token_block
from terminal import run_here
from transformers import AutoModelForCausalLM

from logitstore.copying import copy_dataset
from logitstore.errors import ConfigError
from logitstore.garbage import collect
from logitstore.inspection import describe_dataset, view_document
from logitstore.manifest import Column
from logitstore.producer.packing import Windows
from logitstore.producer.policy import rows_of
from logitstore.producer.projecting import Projected, Projection, sum_by_class
from logitstore.producer.request import ProduceConfig
from logitstore.producer.scoring import Measures, ScoredBlock, score_block
from logitstore.producer.selection import Policy, Threshold, TopK
from logitstore.producer.teacher import Teacher
from logitstore.signals import SparseSignal, read_sparse
from logitstore.sparse import SparseRows
from logitstore.store import Store
from logitstore.token_parts import TokenBlock, read_tokens
from logitstore.tokenizer import Tokenizer
from logitstore.verification import verify
from logitstore.versions import read_version
from logitstore.vocabulary_maps import VocabularyMaps, build_maps, read_maps

_STEP = 0.01
_ROUNDING = _STEP / 2 + 1e-3


@dataclass(frozen=True)
class _World:
    folder: Path
    teacher: Path
    student: Path
    corpus: Path

    def maps(self) -> VocabularyMaps:
        return build_maps(Tokenizer.from_folder(self.student), Tokenizer.from_folder(self.teacher))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> _World:
    folder = tmp_path_factory.mktemp("projected")
    tokenizer = build_bytelevel_tokenizer(folder / "tokenizer", 420)
    # The head is wider than the vocabulary: what it says of padding is in no class.
    teacher = save_teacher(folder / "teacher", tokenizer, vocab_size=440, max_position_embeddings=512)
    build_metaspace_tokenizer(folder / "student", 700)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{n}. {TEXTS[n % len(TEXTS)]}"}) + "\n" for n in range(6)))
    return _World(folder, teacher, folder / "student", corpus)


def _produce(world: _World, url: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[Store, str]:
    ran = run_here(
        capsys,
        *("produce", str(url), "--data", str(world.corpus), "--dataset", "d", "--teacher", f"t={world.teacher}"),
        *("--device", "cpu", "--threads", "1", "--held-out", "0", "--logprob-step", str(_STEP), *options),
    )
    assert ran.code == 0, ran
    return Store.open(str(url)), ran.out


def _projected(store: Store) -> Column:
    (column,) = store.dataset("d").manifest.find("signal", signal="projected")
    return column


def _masses(rows: SparseRows, num_classes: int) -> np.ndarray:
    """float64 [T, C]: what each row says of each class; NaN where it says nothing."""
    masses = np.full((rows.num_rows, num_classes), np.nan)
    masses[np.repeat(np.arange(rows.num_rows), rows.counts), rows.ids] = np.exp(rows.logprobs().astype(np.float64))
    return masses


def _class_of(maps: VocabularyMaps, head_rows: int) -> np.ndarray:
    classes = maps.classes
    padded = np.pad(classes.teacher_class, (0, head_rows - len(classes.teacher_class)), constant_values=-1)
    return np.where(padded < 0, classes.num_classes, padded)


def _reference(world: _World, tokens: TokenBlock, class_of: np.ndarray, num_classes: int) -> np.ndarray:
    """float64 [T, C]: the model's own distributions, document by document, pushed forward; NaN without context."""
    model = AutoModelForCausalLM.from_pretrained(world.teacher, dtype=torch.float64).eval()
    masses = np.full((tokens.num_tokens, num_classes), np.nan)
    for begin, end in zip(tokens.begins.tolist(), tokens.ends.tolist(), strict=True):
        with torch.inference_mode():
            logits = model(torch.from_numpy(tokens.ids[begin:end].astype(np.int64))[None]).logits[0]
        for row, probs in enumerate(logits.softmax(-1).numpy()[:-1], begin + 1):
            masses[row] = np.bincount(class_of, weights=probs, minlength=num_classes)
    return masses


def test_stored_class_masses_are_the_models_own(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--signals", "scalars,sparse,sparse@student", "--student-tokenizer", str(world.student))
    store, _ = _produce(world, tmp_path / "store", capsys, *options, "--select", "topk:24", "--temperatures", "1,2")
    column, maps = _projected(store), world.maps()
    assert column.template["projection"] == {"student": maps.student, "maps": maps.digest}
    assert column.template["temperatures"] == ["1.0"]
    assert read_maps(store, maps.digest).to_asset() == maps.to_asset()
    num_classes = maps.classes.num_classes + 1
    tokens_column = store.dataset("d").manifest.column(column.template["tokens"])
    assert tokens_column is not None
    for block in range(len(store.dataset("d").manifest.plan.blocks)):
        tokens = read_tokens(store.column_part(tokens_column, block))
        signal = read_sparse(store.column_part(column, block))
        assert (signal.projection, signal.temperatures) == (maps.digest, (1.0,))
        class_of = _class_of(maps, 440)
        expected = _reference(world, tokens, class_of, num_classes)
        found, scored = _masses(signal.rows, num_classes), signal.rows.scored
        assert scored.tolist() == (tokens.positions() > 0).tolist()
        kept = ~np.isnan(found)
        assert np.abs(np.log(found[kept]) - np.log(expected[kept])).max() < _ROUNDING
        rest = np.where(kept, 0.0, expected).sum(-1)[scored]
        assert np.abs(signal.rest[scored, 0] - np.log(rest)).max() < _ROUNDING
        # Column 0 is the class of the realised token, and the 24 heaviest classes are there.
        first = signal.rows.offsets[:-1][scored]
        assert (signal.rows.ids[first] == class_of[tokens.ids[scored]]).all()
        assert (signal.rows.counts[scored] >= 24).all()
        least = np.sort(expected[scored], axis=-1)[:, -24]
        assert (np.nan_to_num(found[scored]).max(-1) >= least).all()
        missing = np.where(kept, 0.0, expected)[scored].max(-1)
        assert (missing <= least * (1 + 1e-5)).all()
    assert np.bincount(maps.classes.teacher_class + 1)[1:].max() > 1
    sparse = next(store.dataset("d").manifest.find("signal", signal="sparse"))
    assert "projection" not in sparse.template
    assert read_sparse(store.column_part(sparse, 0)).projection is None


@pytest.fixture(scope="module")
def model_teacher() -> Teacher:
    return Teacher(build_model(vocab_size=97), "a test")


@pytest.fixture(scope="module")
def tokens() -> TokenBlock:
    return token_block(random_documents([1, 17, 2, 60, 25, 3], 97))


def _projection(seed: int = 0, num_classes: int = 30) -> Projection:
    class_of = np.random.default_rng(seed).integers(0, num_classes - 1, 97)
    class_of[5:9] = num_classes - 1
    return Projection("digest", torch.from_numpy(class_of), num_classes)


def _score(teacher: Teacher, tokens: TokenBlock, policy: Policy, projection: Projection) -> ScoredBlock:
    measures = Measures(policy=policy, projected={"x": Projected(projection, policy)}, sampled_logprobs=True)
    return score_block(teacher, tokens, np.arange(6).astype(np.uint64), Windows(24, 6), 80, measures)


def test_projection_changes_no_row_over_tokens(model_teacher: Teacher, tokens: TokenBlock) -> None:
    alone = score_block(
        model_teacher, tokens, np.arange(6).astype(np.uint64), Windows(24, 6), 80, Measures(policy=TopK(5))
    )
    both = score_block(
        model_teacher,
        tokens,
        np.arange(6).astype(np.uint64),
        Windows(24, 6),
        80,
        Measures(policy=TopK(5), projected={"x": Projected(_projection(), TopK(5))}),
    )
    np.testing.assert_array_equal(alone.scalars, both.scalars)
    assert alone.sparse is not None
    assert both.sparse is not None
    np.testing.assert_array_equal(alone.sparse.rows.ids, both.sparse.rows.ids)
    np.testing.assert_array_equal(alone.sparse.rest, both.sparse.rest)
    assert alone.projected == {}


def test_one_class_a_token_changes_nothing(model_teacher: Teacher, tokens: TokenBlock) -> None:
    identity = Projection("digest", torch.arange(97), 98)
    for policy in (TopK(7), Threshold(0.05, seed=3)):
        scored = _score(model_teacher, tokens, policy, identity)
        own, projected = scored.sparse, scored.projected["x"]
        assert own is not None
        np.testing.assert_array_equal(own.rows.ids, projected.rows.ids)
        np.testing.assert_array_equal(own.rows.draws, projected.rows.draws)
        np.testing.assert_allclose(own.rest, projected.rest, atol=1e-4)


def test_draws_are_unbiased_on_classes(model_teacher: Teacher, tokens: TokenBlock) -> None:
    """Systematic sampling: each row weighs 1 within theta, and the mean over seeds is each class's mass."""
    projection, theta, num_seeds = _projection(), 0.1, 150
    rows = np.flatnonzero(tokens.positions() > 0)[:6]
    total = np.zeros((len(rows), 30))
    for seed in range(num_seeds):
        signal = _score(model_teacher, tokens, Threshold(theta, seed), projection).projected["x"]
        weights = _weights(signal, 30)[rows]
        assert np.abs(weights.sum(-1) - 1).max() <= theta + 0.06
        total += weights
    exact = _masses(_score(model_teacher, tokens, TopK(30), projection).projected["x"].rows, 30)[rows]
    # Weights of certain entries are rounded to a step of 0.1 nat; a draw has variance below theta * mass.
    tolerance = 5 * np.sqrt(theta * exact / num_seeds) + 0.06 * exact
    assert (np.abs(total / num_seeds - exact) <= tolerance).all()


def _weights(signal: SparseSignal, num_classes: int) -> np.ndarray:
    rows = signal.rows
    weights = np.zeros((rows.num_rows, num_classes))
    assert signal.draw_weight is not None
    certain = np.exp(rows.logprobs().astype(np.float64))
    weights[np.repeat(np.arange(rows.num_rows), rows.counts), rows.ids] = np.where(
        rows.draws > 0, rows.draws * signal.draw_weight, certain
    )
    return weights


def test_push_forward_sums_every_class() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 97, generator=generator) * 8
    realised = torch.tensor([0, 5, 96, 7, 3])
    projection = _projection()
    rows = projection.push_forward(rows_of(logits, realised, torch.tensor([[1, -1, 96]] * 5)))
    expected = torch.zeros(5, 30, dtype=torch.float64)
    expected.index_add_(1, projection.class_V, logits.double().softmax(-1))
    torch.testing.assert_close(rows.probs_RV.double(), expected, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(rows.probs_RV.sum(-1), torch.ones(5))
    assert rows.realised_R.tolist() == projection.class_V[realised].tolist()
    assert rows.argmax_R.tolist() == expected.argmax(-1).tolist()
    one, other = projection.class_V[[1, 96]].tolist()
    assert rows.given_RK is not None
    assert rows.given_RK.tolist() == [[one, -1, other]] * 5
    empty = ~torch.isin(torch.arange(30), projection.class_V)
    assert torch.isneginf(rows.logits_RV[:, empty]).all()
    torch.testing.assert_close(sum_by_class(rows.probs_RV, torch.zeros(30, dtype=torch.int64), 1), torch.ones(5, 1))


def test_threshold_is_settled_on_classes(world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--signals", f"sparse,sparse@{world.student}", "--select", "threshold:6")
    store, _ = _produce(world, tmp_path / "store", capsys, *options)
    manifest, column = store.dataset("d").manifest, _projected(store)
    (sparse,) = manifest.find("signal", signal="sparse")
    thetas = [read_sparse(store.column_part(each, 0)).draw_weight for each in (sparse, column)]
    assert None not in thetas
    assert thetas[0] != thetas[1]
    assert column.template["selection"]["theta"] != sparse.template["selection"]["theta"]
    entries = column.stats["num_entries"] / column.stats["num_scored"]
    assert 4 <= entries <= 9
    # A tokenizer that is only projected for gives neither tokens nor an alignment.
    assert len(list(manifest.find("tokens"))) == 1
    assert list(manifest.find("alignment")) == []


def test_a_second_run_scores_nothing(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITSTORE_CACHE", str(tmp_path / "cache"))
    options = ("--signals", f"sparse@{world.student}", "--select", "threshold:4")
    first, _ = _produce(world, tmp_path / "store", capsys, *options)
    before = first.dataset("d").manifest.identity
    monkeypatch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("a teacher was loaded"))
    again, out = _produce(world, tmp_path / "store", capsys, *options)
    assert "no teacher forward was run" in out
    assert (again.dataset("d").number, again.dataset("d").manifest.identity) == (1, before)


def test_collections_and_copies_take_the_maps_along(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = _produce(world, tmp_path / "store", capsys, "--signals", f"sparse@{world.student}", "--select", "topk:4")
    digest = _projected(store).template["projection"]["maps"]
    for days in (8, 16):
        collect(store, 7 * 86400.0, now=time.time() + days * 86400.0)
    other = Store.open_or_create(str(tmp_path / "other"))
    copy_dataset(store, other, read_version(store.storage, "d", 1))
    for each in (store, other):
        assert read_maps(each, digest).digest == digest
        assert verify(each).faults == ()


def test_inspect_names_classes_by_their_tokens(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--signals", "sparse,sparse@student", "--student-tokenizer", str(world.student), "--select", "topk:4")
    store, _ = _produce(world, tmp_path / "store", capsys, *options)
    version, tokenizer, maps = store.dataset("d"), Tokenizer.from_folder(world.teacher), world.maps()
    signals = describe_dataset(store, version)["teachers"][0]["signals"]
    assert sorted(signals) == ["sparse topk:4", "sparse@student topk:4"]
    view = view_document(store, version, 0, signal="sparse@student")
    (column,) = version.manifest.find("signal", signal="projected")
    rows = read_sparse(store.column_part(column, 0)).rows
    begin = int(rows.offsets[1])
    names = [maps.class_tokens[number] for number in rows.ids[begin : int(rows.offsets[2])]]
    expected = {tokenizer.token_text(int(name)) if name >= 0 else "[rest]" for name in names}
    assert {text for text, _, _ in view.tokens[1].candidates} == expected
    ran = run_here(capsys, "inspect", str(tmp_path / "store"), "--dataset", "d", "--document", "0", "--signal", "x")
    assert "no signal 'x'" in ran.refusal()
    assert "sparse@student topk:4" in ran.err


def test_unknown_signals_and_tokenizers_are_refused_in_a_line(
    world: _World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for signals, message in (
        ("sparse@", "--signals 'sparse@': expected some of scalars, sparse, sparse@TOKENIZER"),
        (f"sparse@{tmp_path}/nowhere", "nowhere"),
    ):
        ran = run_here(
            capsys,
            *("produce", str(tmp_path / "store"), "--data", str(world.corpus), "--dataset", "d", "--device", "cpu"),
            *("--teacher", f"t={world.teacher}", "--signals", signals),
        )
        assert message in ran.refusal()
    assert not (tmp_path / "store").exists()


def test_a_name_that_nobody_gave_is_refused() -> None:
    from logitstore.producer.request import projected_tokenizers

    config = ProduceConfig(signals=("sparse@other",))
    with pytest.raises(ConfigError, match="--signals sparse@other: no tokenizer of that name; there are: none"):
        projected_tokenizers(config.signals, [])
