"""The alignment of symbols, against a plain dynamic programme over all of both sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitstore.character_folding import CONTROL, FOLDS, MARK, SIGNIFICANT, SPACE, fold, kind_of
from logitstore.symbol_alignment import FAILED, UNKNOWN_TOKEN, align_symbols

MARK_1, MARK_2 = "\u0301", "\u0302"
ALPHABET = f"ab {MARK_1}{MARK_2}Ж"
"""Two known symbols, three ignorable ones, and one that no token of the vocabulary has."""
UNKNOWN = "?"
WRONG = 10**6


def align(text: str, tokens: str, known: str = "ab"):
    """What each symbol of the tokens covers, and the cost; ``?`` is an unknown token."""
    in_vocabulary = np.zeros(0x110000, np.bool_)
    in_vocabulary[[ord(symbol) for symbol in known]] = True
    FOLDS.learn(np.array([ord(symbol) for symbol in text + tokens], np.int32))
    text_N = np.array([ord(symbol) for symbol in text], np.int32)
    tokens_M = np.array([UNKNOWN_TOKEN if symbol == UNKNOWN else ord(symbol) for symbol in tokens], np.int32)
    covers, cost = align_symbols(text_N, tokens_M, FOLDS.kind, in_vocabulary)
    return covers.tolist(), cost


def reference_cost(text: str, tokens: str, known: str = "ab") -> float:
    """The same prices, over all places."""

    def cover(symbol):
        return 8 if symbol == " " else 2 if symbol in known else 0

    costs = np.full((len(text) + 1, len(tokens) + 1), np.inf)
    costs[0, 0] = 0
    for i in range(len(text) + 1):
        for j in range(len(tokens) + 1):
            ways = [costs[i, j]]
            if i and j and tokens[j - 1] == UNKNOWN:
                ways.append(costs[i - 1, j - 1] + cover(text[i - 1]))
            elif i and j and tokens[j - 1] == text[i - 1]:
                ways.append(costs[i - 1, j - 1])
            if i and kind_of(text[i - 1]) != SIGNIFICANT:
                ways.append(costs[i - 1, j] + 1)
            elif i and j and tokens[j - 1] == UNKNOWN:
                ways.append(costs[i - 1, j] + cover(text[i - 1]) + 8 * (i > 1 and text[i - 2] == " "))
            elif i:
                ways.append(costs[i - 1, j] + WRONG)
            if j:
                fails = tokens[j - 1] == UNKNOWN or kind_of(tokens[j - 1]) == SIGNIFICANT
                ways.append(costs[i, j - 1] + (WRONG if fails else 1))
            costs[i, j] = min(ways)
    return float(costs[-1, -1])


@settings(max_examples=300)
@example("a ", f"a {UNKNOWN}")
@example("a  b", f"a  {UNKNOWN}{UNKNOWN}b")
@given(st.text(ALPHABET, max_size=25), st.text(ALPHABET + UNKNOWN, max_size=25))
def test_any_two_strings_cost_what_a_plain_programme_says(text, tokens):
    _, cost = align(text, tokens)
    expected = reference_cost(text, tokens)
    assert cost == (expected if expected < WRONG else FAILED)


@st.composite
def normalised(draw):
    """A text, and tokens of it with words unknown and ignorable symbols dropped and added."""
    text = draw(st.text(ALPHABET, max_size=60))
    tokens = []
    for symbol in text:
        change = draw(st.integers(0, 9))
        if kind_of(symbol) != SIGNIFICANT:
            tokens.append(symbol if change < 5 else "")
        elif symbol == "Ж" or change == 0:
            tokens.append(UNKNOWN)
        else:
            tokens.append(symbol if change < 9 else " " + symbol)
    return text, "".join(tokens)


@settings(max_examples=300)
@given(normalised())
def test_normalised_texts_are_aligned_at_the_lowest_cost_and_in_order(pair):
    text, tokens = pair
    covers, cost = align(text, tokens)
    assert cost == reference_cost(text, tokens) < WRONG
    found = [at for at in covers if at >= 0]
    assert found == sorted(set(found))
    for symbol, at in zip(tokens, covers, strict=True):
        assert symbol == UNKNOWN or at < 0 or text[at] == symbol
        assert at >= 0 or kind_of(symbol) != SIGNIFICANT


@pytest.mark.parametrize(
    ("text", "tokens", "covers"),
    [
        ("a b", "ab", [0, 2]),
        ("ab", " a b", [-1, 0, -1, 1]),
        ("aЖb", "a?b", [0, 1, 2]),
        ("ЖЖ ЖЖ", "??", [1, 4]),  # a word each
        ("aЖЖ b", "a? b", [0, 2, 3, 4]),
        ("ababab", "?ab", [3, 4, 5]),
        (f"a{MARK_1}{MARK_2}b", f"a{MARK_2}{MARK_1}b", [0, -1, 1, 3]),
    ],
)
def test_examples_are_aligned_as_people_would(text, tokens, covers):
    assert align(text, tokens)[0] == covers


def test_a_word_longer_than_any_window_is_covered_whole():
    covers, cost = align("b " + "a" * 5000 + " ab", "b ? ab")
    assert covers == [0, 1, 5001, 5002, 5003, 5004]
    assert cost == 2 * 5000


def test_a_text_of_unknown_characters_and_ignorable_ones_is_aligned_window_by_window():
    covers, cost = align("Ж" * 1000 + " " * 1000 + "Жab", "?" * 1000 + "?ab")
    assert covers == [*range(1000), 2000, 2001, 2002]
    assert cost == 1000


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("a", "b"), ("a", ""), ("", "a"), ("", "?"), ("  ", "?a"), ("ab", "a"), ("aЖ", "ab"), ("a" * 500, "b" * 500)],
)
def test_what_cannot_be_matched_fails(text, tokens):
    assert align(text, tokens)[1] == FAILED


def test_fold_makes_one_of_all_spellings():
    assert fold("é") == fold("É") == "e\u0301"
    assert fold("ﬁ") == "fi"
    assert fold("７") == "7"
    assert fold("ß") == fold("ẞ") == "ss"
    assert fold("ς") == fold("Σ") == "σ"
    assert fold("\u3000") == fold("\n") == fold("▁") == " "
    assert fold("\u200d") == "\u200d"
    assert [kind_of(symbol) for symbol in "a\u0301 \u200d7"] == [SIGNIFICANT, MARK, SPACE, CONTROL, SIGNIFICANT]


@given(st.text(max_size=20))
def test_the_table_holds_what_fold_says(text):
    points = np.array([ord(character) for character in text], np.int32)
    FOLDS.learn(points)
    for character, number in zip(text, FOLDS.symbol[points].tolist(), strict=True):
        if number >= 0:
            found = [number]
        else:
            begin, end = FOLDS.bounds[-2 - number], FOLDS.bounds[-1 - number]
            found = FOLDS.several[begin:end].tolist()
        assert found == [ord(symbol) for symbol in fold(character)]
