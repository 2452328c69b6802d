"""Scores of packed batches against each document run by itself, unpacked, in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from teachers import build_model, random_documents, token_block
from transformers import PreTrainedModel

from logitstore.counter_random import uniform_words
from logitstore.errors import ModelError
from logitstore.producer import scoring
from logitstore.producer.packing import Windows, cut_windows
from logitstore.producer.scoring import Measures, ScoredBlock, score_block
from logitstore.producer.selection import Policy, Threshold, TopK
from logitstore.producer.teacher import Teacher
from logitstore.signals import scalar_columns
from logitstore.sparse import DEFAULT_STEP_NATS, SparseRows
from logitstore.token_parts import TokenBlock

_WINDOWS = Windows(24, 6)
_LENGTHS = [1, 17, 2, 60, 1, 25, 24, 9, 3, 1]
_TEMPERATURES = (1.0, 0.5, 2.0)
_ROUNDING = DEFAULT_STEP_NATS / 2 + 1e-3


def _reference(model: PreTrainedModel, tokens: TokenBlock, windows: Windows) -> np.ndarray:
    """Log-probs float64 [T, V] of each window alone, in float64; NaN where a token has no context."""
    double = copy.deepcopy(model).double()
    logprobs = np.full((tokens.num_tokens, model.config.vocab_size), np.nan)
    for window in cut_windows(tokens, windows):
        ids = torch.from_numpy(tokens.ids[window.begin : window.end].astype(np.int64))
        with torch.inference_mode():
            logits = double(input_ids=ids[None], use_cache=False).logits[0].double()
        new = slice(window.first - window.begin, None)
        logprobs[window.first + 1 : window.end + 1] = logits.log_softmax(-1).numpy()[new]
    return logprobs


def _score(
    teacher: Teacher,
    tokens: TokenBlock,
    policy: Policy | None,
    temperatures: tuple[float, ...] = (1.0,),
    batch_tokens: int = 80,
) -> ScoredBlock:
    measures = Measures(policy=policy, temperatures=temperatures, sampled_logprobs=True)
    return score_block(teacher, tokens, _document_words(tokens), _WINDOWS, batch_tokens, measures)


def _document_words(tokens: TokenBlock) -> np.ndarray:
    return np.arange(100, 100 + len(tokens.ends)).astype(np.uint64)


def _ids_of(rows: SparseRows, row: int) -> list[int]:
    return rows.ids[rows.offsets[row] : rows.offsets[row + 1]].tolist()


def _entry_rows(rows: SparseRows) -> np.ndarray:
    return np.repeat(np.arange(rows.num_rows), rows.counts)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_model(vocab_size=97)


@pytest.fixture(scope="module")
def tokens() -> TokenBlock:
    return token_block(random_documents(_LENGTHS, 97))


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, tokens: TokenBlock) -> np.ndarray:
    return _reference(model, tokens, _WINDOWS)


@pytest.fixture(scope="module")
def teacher(model: PreTrainedModel) -> Teacher:
    return Teacher(model, "tiny")


def test_scalars_match_float64_reference(teacher: Teacher, tokens: TokenBlock, expected: np.ndarray) -> None:
    scored = _score(teacher, tokens, None, _TEMPERATURES)
    assert scored.sparse is None
    np.testing.assert_array_equal(scored.scored, tokens.positions() > 0)
    np.testing.assert_array_equal(np.isnan(scored.scalars).all(-1), ~scored.scored)
    columns = dict(zip(scalar_columns(_TEMPERATURES), scored.scalars[scored.scored].T, strict=True))
    logprobs, realised = expected[scored.scored], tokens.ids[scored.scored]
    of_realised = np.take_along_axis(logprobs, realised[:, None].astype(int), 1)
    np.testing.assert_allclose(columns["logprob"], of_realised[:, 0], atol=1e-4)
    np.testing.assert_array_equal(columns["rank"], (logprobs > of_realised).sum(1))
    np.testing.assert_array_equal(columns["argmax_id"], logprobs.argmax(1))
    np.testing.assert_allclose(columns["argmax_logprob"], logprobs.max(1), atol=1e-4)
    np.testing.assert_allclose(columns["entropy"], -(np.exp(logprobs) * logprobs).sum(1), atol=1e-4)
    for temperature in (0.5, 2.0):
        ratio = np.log(np.exp(logprobs / temperature).sum(1))
        np.testing.assert_allclose(columns[f"log_z_ratio@{temperature:g}"], ratio, atol=1e-4)


@pytest.mark.parametrize("policy", [TopK(5), Threshold(0.02)], ids=str)
def test_rows_match_float64_reference(
    policy: Policy, teacher: Teacher, tokens: TokenBlock, expected: np.ndarray
) -> None:
    temperatures = _TEMPERATURES if isinstance(policy, TopK) else (1.0,)
    signal = _score(teacher, tokens, policy, temperatures).sparse
    assert signal is not None
    assert signal.draw_weight == policy.draw_weight
    rows = signal.rows
    np.testing.assert_array_equal(rows.scored, tokens.positions() > 0)
    entry_rows = _entry_rows(rows)
    np.testing.assert_allclose(rows.logprobs(), expected[entry_rows, rows.ids], atol=_ROUNDING)
    outside = expected.copy()
    outside[entry_rows, rows.ids] = -np.inf
    for column, temperature in enumerate(temperatures):
        log_rest = np.log(np.exp(outside[rows.scored] / temperature).sum(1))
        np.testing.assert_allclose(signal.rest[rows.scored, column], log_rest, atol=1e-4)
    assert np.isnan(signal.rest[~rows.scored]).all()


def test_topk_rows_hold_first_k_and_realised(teacher: Teacher, tokens: TokenBlock, expected: np.ndarray) -> None:
    signal = _score(teacher, tokens, TopK(5)).sparse
    assert signal is not None
    for row in np.flatnonzero(signal.rows.scored):
        first = set(np.argsort(-expected[row], kind="stable")[:5].tolist())
        assert set(_ids_of(signal.rows, row)) == first | {int(tokens.ids[row])}


def test_threshold_rows_hold_certain_and_sampled(teacher: Teacher, tokens: TokenBlock, expected: np.ndarray) -> None:
    theta = 0.02
    signal = _score(teacher, tokens, Threshold(theta)).sparse
    assert signal is not None
    rows = signal.rows
    probs = np.exp(expected)
    entry_rows = _entry_rows(rows)
    is_certain = (probs[entry_rows, rows.ids] >= theta) | (rows.ids == tokens.ids[entry_rows])
    is_certain |= rows.ids == expected[entry_rows].argmax(-1)
    np.testing.assert_array_equal(rows.sampled, ~is_certain)
    assert rows.sampled.any()
    for row in np.flatnonzero(rows.scored):
        assert set(np.flatnonzero(probs[row] >= theta).tolist()) <= set(_ids_of(rows, row))


@pytest.mark.parametrize("policy", [TopK(7), Threshold(0.02)], ids=str)
def test_entries_in_stored_order(policy: Policy, teacher: Teacher, tokens: TokenBlock) -> None:
    signal = _score(teacher, tokens, policy).sparse
    assert signal is not None
    rows = signal.rows
    for row in np.flatnonzero(rows.scored):
        begin, end = rows.offsets[row], rows.offsets[row + 1]
        assert rows.ids[begin] == tokens.ids[row]
        others = list(zip(rows.quanta[begin + 1 : end].tolist(), rows.ids[begin + 1 : end].tolist(), strict=True))
        assert others == sorted(others)
        assert len(set(_ids_of(rows, row))) == end - begin


def test_rest_is_nothing_when_everything_is_kept(teacher: Teacher, tokens: TokenBlock) -> None:
    signal = _score(teacher, tokens, TopK(1000), (1.0, 2.0)).sparse
    assert signal is not None
    assert (signal.rows.counts[signal.rows.scored] == 97).all()
    assert (signal.rest[signal.rows.scored] == -np.inf).all()


def test_rest_below_float32_is_not_lost() -> None:
    # A teacher so sure that all but its first choice are below e^-100: their mass is small, not nothing.
    model = build_model(vocab_size=40, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.0)
        model.get_output_embeddings().bias = torch.nn.Parameter(torch.full((40,), -120.0))
        model.get_output_embeddings().bias[7] = 0.0
    signal = _score(Teacher(model, "sure"), token_block([[7] * 9]), TopK(1)).sparse
    assert signal is not None
    np.testing.assert_allclose(signal.rest[1:, 0], -120.0 + np.log(39), rtol=1e-5)


@pytest.mark.parametrize("vocab_size", [2, 31, 32, 33, 131, 1000])
def test_odd_vocabularies_match_reference(vocab_size: int) -> None:
    model = build_model(vocab_size=vocab_size, seed=vocab_size)
    tokens = token_block(random_documents([5, 30, 1, 12], vocab_size))
    expected = _reference(model, tokens, _WINDOWS)
    scored = _score(Teacher(model, "odd"), tokens, Threshold(0.05))
    assert scored.sparse is not None
    rows = scored.sparse.rows
    np.testing.assert_allclose(rows.logprobs(), expected[_entry_rows(rows), rows.ids], atol=_ROUNDING)
    ranks = (expected > expected[np.arange(len(expected)), tokens.ids][:, None]).sum(1)
    np.testing.assert_array_equal(scored.scalars[scored.scored, 1], ranks[scored.scored])


def test_vocabulary_wider_than_tokenizer_is_normalised_whole(tokens: TokenBlock) -> None:
    # Heads are often padded: their last columns have no token, and still belong to the distribution.
    model = build_model(vocab_size=128)
    wide = _reference(model, tokens, _WINDOWS)
    scored = _score(Teacher(model, "wide"), tokens, None)
    realised = wide[np.arange(tokens.num_tokens), tokens.ids]
    np.testing.assert_allclose(scored.scalars[scored.scored, 0], realised[scored.scored], atol=1e-4)


@pytest.mark.parametrize("policy", [TopK(6), Threshold(0.02)], ids=str)
def test_scores_do_not_depend_on_batches_or_chunks(
    policy: Policy, teacher: Teacher, tokens: TokenBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _score(teacher, tokens, policy, batch_tokens=1000)
    monkeypatch.setitem(scoring._CHUNK_LOGITS, "cpu", 97 * 5)
    many = _score(teacher, tokens, policy, batch_tokens=24)
    np.testing.assert_allclose(one.scalars, many.scalars, atol=1e-4)
    assert one.sparse is not None
    assert many.sparse is not None
    np.testing.assert_array_equal(one.sparse.rows.offsets, many.sparse.rows.offsets)
    # Float32 differs in its last bits between batch shapes, so an entry near the middle of a step may cross it.
    assert (one.sparse.rows.ids != many.sparse.rows.ids).mean() < 0.02


def test_scores_of_bf16_break_ties_by_id(tokens: TokenBlock) -> None:
    model = build_model(vocab_size=600).to(torch.bfloat16)
    teacher = Teacher(model, "half")
    scored = _score(teacher, tokens, TopK(20), batch_tokens=24)
    assert scored.sparse is not None
    rows, num_ties = scored.sparse.rows, 0
    for window in cut_windows(tokens, _WINDOWS):
        if window.first > window.begin:
            continue  # only first windows, which are easily run again the same way
        ids = torch.from_numpy(tokens.ids[window.begin : window.end].astype(np.int64))
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float().numpy()
        for offset in range(len(ids)):
            row = window.begin + offset + 1
            order = np.argsort(-logits[offset], kind="stable")
            if abs(scored.scalars[row, 3] - torch.from_numpy(logits[offset]).log_softmax(-1).max().item()) > 1e-5:
                continue  # packed with others, bf16 came out differently
            num_ties += logits[offset][order[19]] == logits[offset][order[20]]
            assert scored.scalars[row, 2] == order[0]
            assert scored.scalars[row, 1] == np.flatnonzero(order == tokens.ids[row])[0]
            assert set(_ids_of(rows, row)) == {*order[:20].tolist(), int(tokens.ids[row])}
    assert num_ties > 5


def test_draws_are_keyed_by_document_and_position(teacher: Teacher, tokens: TokenBlock) -> None:
    """A document draws the same entries wherever it stands."""
    documents = [tokens.ids[a:b].tolist() for a, b in zip(tokens.begins, tokens.ends, strict=True)]
    words = _document_words(tokens)
    policy = Threshold(0.02)
    forward = _score(teacher, tokens, policy).sparse
    turned = token_block(documents[::-1])
    backward = score_block(
        teacher, turned, words[::-1].copy(), _WINDOWS, 80, Measures(policy=policy, sampled_logprobs=True)
    ).sparse
    assert forward is not None
    assert backward is not None
    for number, (begin, end) in enumerate(zip(tokens.begins, tokens.ends, strict=True)):
        other = turned.begins[len(documents) - 1 - number]
        for offset in range(end - begin):
            assert _ids_of(forward.rows, begin + offset) == _ids_of(backward.rows, other + offset)


def test_draws_differ_between_seeds(teacher: Teacher, tokens: TokenBlock) -> None:
    first, second = (_score(teacher, tokens, Threshold(0.02, seed)).sparse for seed in (0, 1))
    assert first is not None
    assert second is not None
    assert first.rows.ids.tolist() != second.rows.ids.tolist()


def test_words_of_rows_are_uniform() -> None:
    words = uniform_words(0, np.arange(20_000).astype(np.uint64), np.zeros(20_000, np.int64))
    counts = np.bincount((words >> np.uint64(60)).astype(int), minlength=16)
    assert ((counts - 1250) ** 2 / 1250).sum() < 45


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", [None, TopK(4), Threshold(0.02)], ids=str)
def test_logits_not_finite_refused_naming_teacher(poison: float, policy: Policy | None, tokens: TokenBlock) -> None:
    model = build_model(vocab_size=97)
    teacher = Teacher(model, "folder/of/teacher")
    with torch.no_grad():
        model.get_output_embeddings().weight[11] = poison
    with pytest.raises(ModelError, match=r"folder/of/teacher: its logits are not finite"):
        _score(teacher, tokens, policy)


def test_progress_told_of_every_input(teacher: Teacher, tokens: TokenBlock) -> None:
    told: list[int] = []
    score_block(teacher, tokens, _document_words(tokens), _WINDOWS, 80, Measures(policy=None), told.append)
    assert sum(told) == sum(window.end - window.begin for window in cut_windows(tokens, _WINDOWS))


def test_block_of_single_tokens_has_no_scores(teacher: Teacher) -> None:
    scored = _score(teacher, token_block([[1], [2]]), TopK(3))
    assert not scored.scored.any()
    assert scored.sparse is not None
    assert scored.sparse.rows.num_entries == 0
