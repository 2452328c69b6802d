"""``threshold:N`` resolved to a theta: the entries that come out are those asked for."""

from __future__ import annotations

import numpy as np
import pytest
from teachers import build_model, random_documents, token_block

from logitstore.producer import calibration
from logitstore.producer.calibration import resolve_theta
from logitstore.producer.packing import Windows
from logitstore.producer.scoring import Measures, score_block
from logitstore.producer.selection import Threshold
from logitstore.producer.teacher import Teacher
from logitstore.token_parts import TokenBlock

_WINDOWS = Windows(64, 16)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(build_model(vocab_size=300), "tiny")


@pytest.fixture(scope="module")
def tokens() -> TokenBlock:
    return token_block(random_documents([90, 1, 40, 5, 200, 33] * 3, 300))


@pytest.mark.parametrize("entries", [4.0, 8.0, 12.0, 40.0])
def test_theta_gives_the_entries_asked_for(entries: float, teacher: Teacher, tokens: TokenBlock) -> None:
    theta = resolve_theta(teacher, tokens, _WINDOWS, 256, entries)
    words = np.arange(len(tokens.ends)).astype(np.uint64)
    signal = score_block(teacher, tokens, words, _WINDOWS, 256, Measures(policy=Threshold(theta))).sparse
    assert signal is not None
    found = signal.rows.counts[signal.rows.scored].mean()
    # The grid's step is 3 %; the draws of a thousand rows add a little.
    assert found == pytest.approx(entries, rel=0.05)


def test_theta_is_repeatable_and_of_two_figures(teacher: Teacher, tokens: TokenBlock) -> None:
    thetas = {resolve_theta(teacher, tokens, _WINDOWS, batch_tokens, 12.0) for batch_tokens in (256, 256, 64)}
    assert len(thetas) == 1
    assert f"{thetas.pop():.2g}" in {f"{theta:.2g}" for theta in calibration._GRID}


def test_more_entries_than_tokens_keeps_all(teacher: Teacher, tokens: TokenBlock) -> None:
    assert resolve_theta(teacher, tokens, _WINDOWS, 256, 1e6) == calibration._GRID[0]


def test_one_entry_takes_the_largest_theta(teacher: Teacher, tokens: TokenBlock) -> None:
    assert resolve_theta(teacher, tokens, _WINDOWS, 256, 1.0) == calibration._GRID[-1]


def test_large_blocks_are_sampled_throughout(
    teacher: Teacher, tokens: TokenBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = resolve_theta(teacher, tokens, _WINDOWS, 64, 12.0)
    monkeypatch.setattr(calibration, "_CALIBRATION_TOKENS", 400)
    seen: list[int] = []
    hidden = teacher.hidden

    def counted(ids: object, positions: object) -> object:
        seen.append(len(positions))  # type: ignore[arg-type]
        return hidden(ids, positions)

    monkeypatch.setattr(teacher, "hidden", counted)
    some = resolve_theta(teacher, tokens, _WINDOWS, 64, 12.0)
    assert 300 < sum(seen) < 700
    assert some == pytest.approx(whole, rel=0.15)
