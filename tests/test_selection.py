"""Selections: which entries are kept for certain, which by a draw, and that draws are unbiased and systematic."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitstore.codecs.row_stream import MAX_ROW_ENTRIES
from logitstore.counter_random import uniform_words
from logitstore.errors import ConfigError
from logitstore.producer.given import Given, GivenIds
from logitstore.producer.policy import Entries, Policy, Rows
from logitstore.producer.selection import (
    MAX_K,
    MIN_THETA,
    Threshold,
    ThresholdBudget,
    TopK,
    TopP,
    Union,
    parse_selection,
)
from logitstore.producer.with_replacement import Sample
from logitstore.selections import is_sampled, selection_name


def _rows(logits_RV: Tensor, realised_R: Tensor | None = None, words_R: Tensor | None = None) -> Rows:
    return Rows(
        logits_RV,
        logits_RV.softmax(-1, dtype=torch.float32),
        logits_RV.argmax(-1),
        torch.zeros(len(logits_RV), dtype=torch.int64) if realised_R is None else realised_R,
        _words(len(logits_RV)) if words_R is None else words_R,
    )


def _words(num_rows: int) -> Tensor:
    words = uniform_words(0, np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, np.int64))
    return torch.from_numpy(words.view(np.int64))


def _masks(entries: Entries, rows: Rows) -> tuple[Tensor, Tensor]:
    """bool [R, V]: kept, and kept by a draw; each entry is listed once."""
    kept, sampled = (torch.zeros_like(rows.logits_RV, dtype=torch.bool) for _ in range(2))
    kept[entries.row_E, entries.id_E] = True
    sampled[entries.row_E[entries.draws_E > 0], entries.id_E[entries.draws_E > 0]] = True
    assert kept.sum() == len(entries.row_E)
    return kept, sampled


def _first_k(logits_V: Tensor, k: int) -> set[int]:
    values = logits_V.tolist()
    return set(sorted(range(len(values)), key=lambda token: (-values[token], token))[:k])


# topk


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 50), st.sampled_from([torch.float32, torch.bfloat16]))
def test_topk_keeps_first_k_and_realised(seed: int, vocab_size: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values: most rows tie at rank k.
    logits = torch.randint(-3, 4, (6, vocab_size), generator=generator).to(dtype)
    realised = torch.randint(0, vocab_size, (6,), generator=generator)
    rows = _rows(logits, realised)
    kept, sampled = _masks(TopK(k).select(rows), rows)
    assert not sampled.any()
    for row in range(6):
        assert set(kept[row].nonzero()[:, 0].tolist()) == _first_k(logits[row], k) | {int(realised[row])}


def test_topk_ties_of_bf16_at_real_width() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = _rows(logits)
    kept, _ = _masks(TopK(64).select(rows), rows)
    reached = (logits >= logits.topk(64).values[:, -1:]).sum(-1)
    assert (reached > 64).any(), "no ties: this test tests nothing"
    for row in range(64):
        assert set(kept[row].nonzero()[:, 0].tolist()) == _first_k(logits[row], 64) | {0}


def test_topk_keeps_everything_when_k_exceeds_vocabulary() -> None:
    rows = _rows(torch.randn(3, 7))
    assert len(TopK(100).select(rows).row_E) == 21


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_smallest_id_among_equals(dtype: torch.dtype) -> None:
    # Scoring relies on torch for this: in contiguous rows long enough for every vectorised path.
    logits = torch.randint(0, 3, (200, 4099), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = np.argmax(logits.float().numpy(), axis=-1)
    np.testing.assert_array_equal(logits.argmax(-1).numpy(), expected)
    np.testing.assert_array_equal(logits.max(-1).indices.numpy(), expected)


# threshold


@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(0.001, 0.5))
def test_threshold_keeps_certain_entries(seed: int, vocab_size: int, theta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(8, vocab_size, generator=generator)
    realised = torch.randint(0, vocab_size, (8,), generator=generator)
    rows = _rows(logits, realised)
    kept, sampled = _masks(Threshold(theta).select(rows), rows)
    certain = rows.probs_RV >= theta
    certain[torch.arange(8), realised] = True
    certain[torch.arange(8), rows.argmax_R] = True
    assert torch.equal(kept & ~sampled, certain)


@given(st.integers(0, 2**31), st.integers(2, 300), st.floats(0.005, 0.5))
def test_threshold_weights_sum_to_one_within_theta(seed: int, vocab_size: int, theta: float) -> None:
    logits = 2 * torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(seed))
    rows = _rows(logits, logits.argmin(-1))
    kept, sampled = _masks(Threshold(theta).select(rows), rows)
    weights = torch.where(sampled, theta, torch.where(kept, rows.probs_RV, 0.0)).sum(-1)
    assert (weights - 1).abs().max() < theta + 1e-5


def test_threshold_includes_in_proportion_to_probability() -> None:
    theta, num_draws = 0.05, 40_000
    logits = (1.5 * torch.randn(1, 150, generator=torch.Generator().manual_seed(1))).expand(num_draws, -1)
    rows = _rows(logits)
    kept, sampled = _masks(Threshold(theta).select(rows), rows)
    chance = (rows.probs_RV[0] / theta).double()
    free = ~(kept & ~sampled)[0]
    assert free.sum() > 100
    found, expected = sampled.double().mean(0)[free], chance[free]
    deviation = (found - expected) / (expected * (1 - expected) / num_draws).sqrt().clamp(min=1e-9)
    # Draws of neighbours exclude each other, so the sum of squares spreads wider than chi-square; its mean is the same.
    assert deviation.abs().max() < 4.5
    assert (deviation**2).mean() < 1.5


def test_threshold_sums_are_unbiased_and_weights_vary_less_than_poisson() -> None:
    theta, num_draws = 0.04, 20_000
    generator = torch.Generator().manual_seed(2)
    logits = (1.5 * torch.randn(1, 120, generator=generator)).expand(num_draws, -1)
    values = torch.randn(120, generator=generator, dtype=torch.float64)
    rows = _rows(logits)
    kept, sampled = _masks(Threshold(theta).select(rows), rows)
    probs = rows.probs_RV.double()
    weights = torch.where(sampled, theta, torch.where(kept, probs, 0.0))
    sums, expected = weights @ values, float(probs[0] @ values)
    assert abs(sums.mean().item() - expected) < 4 * sums.std().item() / num_draws**0.5
    free = ~(kept & ~sampled)[0]
    chance = (probs[0] / theta)[free]
    poisson = (theta**2 * chance * (1 - chance)).sum()
    assert weights.sum(-1).var() < 0.1 * poisson


def test_threshold_draws_as_one_running_sum() -> None:
    # The reference draws with one exact running sum over the whole vocabulary, at widths around those of the groups.
    for vocab_size in (1, 2, 31, 32, 33, 64, 1000):
        logits = 2 * torch.randn(50, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        rows = _rows(logits, logits.argmin(-1))
        theta = 0.02
        kept, sampled = _masks(Threshold(theta).select(rows), rows)
        chances = (rows.probs_RV * (2**40 / theta)).to(torch.int64).masked_fill(kept & ~sampled, 0)
        for row in range(50):
            total = (int(rows.words_R[row]) >> 24) & (2**40 - 1)
            for token, chance in enumerate(chances[row].tolist()):
                passes = (total + chance) >> 40 > total >> 40
                assert bool(sampled[row, token]) == passes
                total += chance


@pytest.mark.parametrize("policy", [TopK(5), TopP(0.8, 20), Threshold(0.03, seed=3), Sample(20, seed=3)], ids=str)
def test_selection_depends_on_each_row_alone(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(40, 90, generator=generator)).bfloat16()
    realised = torch.randint(0, 90, (40,), generator=generator)
    rows = _rows(logits, realised)
    expected = _masks(policy.select(rows), rows)
    order = torch.randperm(40, generator=generator)
    for part in order.split(7):
        few = Rows(*(values[part] for values in rows[:5]))
        for found, whole in zip(_masks(policy.select(few), few), expected, strict=True):
            assert torch.equal(found, whole[part])


def test_threshold_of_smallest_theta_keeps_all_that_is_likely() -> None:
    rows = _rows(torch.tensor([[0.0, -1.0, -60.0, -2.0]]))
    kept, _ = _masks(Threshold(1e-9).select(rows), rows)
    assert kept.tolist() == [[True, True, False, True]]


# topp


@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(1, 70), st.floats(0.01, 1.0))
def test_topp_keeps_the_smallest_set_that_reaches_p(seed: int, vocab_size: int, max_k: int, p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few distinct values: sets end among equals.
    logits = torch.randint(-4, 5, (5, vocab_size), generator=generator).bfloat16()
    realised = torch.randint(0, vocab_size, (5,), generator=generator)
    rows = _rows(logits, realised)
    kept, sampled = _masks(TopP(p, max_k).select(rows), rows)
    assert not sampled.any()
    for row in range(5):
        order = np.argsort(-logits[row].float().numpy(), kind="stable")
        mass, expected = 0, set()
        for token in order[:max_k].tolist():
            if mass >= int(p * 2**40):
                break
            expected.add(token)
            mass += int(rows.probs_RV[row, token].double() * 2**40)
        assert set(kept[row].nonzero()[:, 0].tolist()) == expected | {int(realised[row])}


# sample


def test_sample_draws_by_inverting_one_running_sum() -> None:
    for vocab_size in (1, 31, 32, 33, 200):
        logits = 2 * torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        rows = _rows(logits, logits.argmin(-1))
        entries = Sample(17).select(rows)
        fixed = (rows.probs_RV * 2**40).to(torch.int64)
        for row in range(20):
            ends, drawn = np.cumsum(fixed[row].numpy()), Counter()
            for word in _splitmix(int(rows.words_R[row]) % 2**64, 17):
                # In Python's integers, which have room for the product.
                drawn[int(np.searchsorted(ends, (word >> 24) * int(ends[-1]) >> 40, side="right"))] += 1
            certain = {int(rows.realised_R[row]), int(rows.argmax_R[row])}
            mine = entries.row_E == row
            found = dict(zip(entries.id_E[mine].tolist(), entries.draws_E[mine].tolist(), strict=True))
            assert found == {
                **{token: n for token, n in drawn.items() if token not in certain},
                **dict.fromkeys(certain, 0),
            }


def _splitmix(state: int, count: int) -> list[int]:
    words = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        word = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        words.append(word ^ word >> 31)
    return words


def test_sample_never_draws_what_is_impossible() -> None:
    logits = torch.full((500, 70), -200.0)
    logits[:, [3, 40, 69]] = 0.0
    entries = Sample(50).select(_rows(logits, torch.full((500,), 3)))
    assert set(entries.id_E.tolist()) == {3, 40, 69}


# given ids


def test_given_ids_are_kept_for_certain_and_nothing_else() -> None:
    rows = _rows(torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3]))
    given = torch.tensor([[5, 6, 5], [-1, -1, -1], [0, -1, -1]])
    entries = Given(_given_ids()).select(rows._replace(given_RK=given))
    assert entries.draws_E.tolist() == [0] * len(entries.row_E)
    expected = [{1, 5, 6}, {2}, {3, 0}]
    for row in range(3):
        found = entries.id_E[entries.row_E == row].tolist()
        assert len(found) == len(set(found))
        assert set(found) == expected[row] | {int(rows.argmax_R[row])}


def _given_ids() -> GivenIds:
    return GivenIds("nowhere", {}, np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int32))


# unions


@given(st.integers(0, 2**31), st.integers(2, 150), st.integers(1, 12), st.sampled_from(["threshold", "sample"]))
def test_union_keeps_for_certain_what_any_part_does(seed: int, vocab_size: int, k: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(6, vocab_size, generator=generator)
    rows = _rows(logits, torch.randint(0, vocab_size, (6,), generator=generator))
    sampler = Threshold(0.05, 3) if name == "threshold" else Sample(9, 3)
    entries = Union((sampler, TopK(k))).select(rows)
    kept, sampled = _masks(entries, rows)
    top, _ = _masks(TopK(k).select(rows), rows)
    alone_kept, alone_sampled = _masks(sampler.select(rows), rows)
    assert torch.equal(kept & ~sampled, top | (alone_kept & ~alone_sampled))
    assert len(entries.row_E) == int(kept.sum()), "an entry stands twice"
    if name == "sample":
        assert torch.equal(sampled, alone_sampled & ~top), "draws that hit what is certain are dropped, the others stay"


def test_union_is_its_sampling_part_to_a_reader() -> None:
    union = parse_selection("topk:8+sample:50+topp:0.9,max=20", 5)
    assert (union.seed, union.draw_weight) == (5, 1 / 50)
    assert parse_selection("topk:8+topp:0.9,max=20", 5).draw_weight is None
    assert selection_name(union.to_json()) == "sample:50+topk:8+topp:0.9,max=20"
    assert is_sampled(union.to_json())
    assert not is_sampled(parse_selection("topk:8+topp:0.9,max=20").to_json())


def test_union_is_one_recipe_however_it_is_written() -> None:
    assert parse_selection("topk:8+sample:50") == parse_selection("sample:50 + topk:8+topk:8")
    assert parse_selection("topk:8+topk:8") == TopK(8)
    assert parse_selection("topk:8+threshold:12", 4).resolve(0.01) == parse_selection("threshold:0.01+topk:8", 4)


@pytest.mark.parametrize("text", ["sample:5+threshold:12", "threshold:0.1+sample:5+topk:3", "sample:5+sample:6"])
def test_two_parts_that_sample_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="two parts sample"):
        parse_selection(text)


def test_union_of_rows_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="could make 80000"):
        parse_selection("topk:40000+topp:0.9,max=40000")


# parsing


@pytest.mark.parametrize(
    "text", [f"topk:{MAX_K}", f"threshold:{MIN_THETA}", f"topp:1,max={MAX_K}", "topk:9+sample:50000"]
)
def test_longest_row_that_may_be_asked_for_fits_the_codec(text: str) -> None:
    policy = parse_selection(text)
    assert isinstance(policy, Policy)
    rows = _rows(torch.zeros(1, 1 << 17), torch.full((1,), (1 << 17) - 1))
    assert len(policy.select(rows).id_E) <= MAX_ROW_ENTRIES


def test_selection_parsed() -> None:
    assert parse_selection("topk:64") == TopK(64)
    assert parse_selection("threshold:0.01", 7) == Threshold(0.01, 7)
    assert parse_selection("threshold:12") == ThresholdBudget(12)
    assert parse_selection("topp:0.9,max=64") == TopP(0.9, 64)
    assert parse_selection("sample:50", 7) == Sample(50, 7)


@pytest.mark.parametrize(
    "text",
    [
        *("topk", "topk:0", "topk:1.5", "topk:65535"),
        *("threshold:0", "threshold:-1", "threshold:nan", "threshold:inf", "threshold:1e-5"),
        *("topp:0.9", "topp:0,max=5", "topp:1.1,max=5", "topp:0.9,max=0", "topp:nan,max=5"),
        *("sample:0", "sample:1.5", "sample:70000", "given:", "topk:4+", "topk:4+random:3", "x"),
    ],
)
def test_selection_refused_unless_known(text: str) -> None:
    with pytest.raises(ConfigError, match="--select"):
        parse_selection(text)
