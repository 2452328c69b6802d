"""The alignment's benchmark: its judge finds faults, its rivals do what they are said to, and small runs go through."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mistral_common")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import alignment_judging
from alignment_corpora import CORPORA, LONG, load_corpus
from alignment_judging import cut, judge
from alignment_measures import pieces_of, race
from alignment_report import Goal, Pair, corpora_table, pairs_table, race_table
from alignment_rivals import StringDP, TwoPointer, array_table, canonical_spellings, decoded_spellings, list_table
from alignment_tokenizers import BenchTokenizer, byte_alphabet, load_tokenizer

from logitstore.alignment import Alignment
from logitstore.token_parts import TokenBlock

BYTELEVEL, LLAMA, WORDPIECE = "ByteLevel", "Llama-3-style", "WordPiece, lower-cased"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BenchTokenizer]:
    build = tmp_path_factory.mktemp("tokenizers")
    return {name: load_tokenizer(name, build, 1024) for name in (BYTELEVEL, LLAMA, WORDPIECE)}


@pytest.mark.parametrize("name", [name for name in CORPORA if name != LONG])
def test_corpora_are_the_same_every_time_and_have_their_size(name: str) -> None:
    texts = load_corpus(name, 20_000)
    assert texts == load_corpus(name, 20_000)
    assert 19_000 < sum(len(text.encode()) for text in texts) <= 20_000


def test_lossless_pairs_are_covered_and_right(trained: dict[str, BenchTokenizer]) -> None:
    teacher, student, texts = trained[BYTELEVEL], trained[LLAMA], load_corpus("Chinese", 20_000)
    found = judge(teacher, student, (cut(teacher, texts), cut(student, texts)), texts, np.arange(1024))
    assert found.coverage == 1.0
    assert found.num_wrong_spans == 0
    assert 0 < found.num_same < found.num_shared


def test_the_judge_finds_a_shifted_boundary(
    trained: dict[str, BenchTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit one token further, as an aligner that is off by one would set it."""
    teacher, student, texts = trained[BYTELEVEL], trained[LLAMA], load_corpus("English", 20_000)
    blocks = cut(teacher, texts), cut(student, texts)

    def off_by_one(a: TokenBlock, b: TokenBlock) -> Alignment:
        right = real_align(a, b)
        shared = right.shared_b.copy()
        moved = next(n for n in range(100, len(shared)) if shared[n] and not shared[n + 1])
        shared[moved : moved + 2] = [False, True]
        return Alignment(right.shared_a, shared, right.statistics)

    real_align = alignment_judging.align
    monkeypatch.setattr(alignment_judging, "align", off_by_one)
    found = judge(teacher, student, blocks, texts, np.arange(1024))
    assert found.num_wrong_spans >= 2
    assert found.coverage < 1.0


def test_normalised_spans_are_judged_by_the_tokenizers_own_normaliser(trained: dict[str, BenchTokenizer]) -> None:
    right = alignment_judging._judge_of(trained[WORDPIECE])
    ids = tuple(trained[WORDPIECE].ours.encode_text("cafe"))
    assert right(ids, "Café ".encode())
    assert not right(ids, b"Caff")
    assert not right(ids, "Café".encode()[:-1])  # half a character


@pytest.mark.parametrize("table", [list_table, array_table])
def test_string_dp_pairs_a_token_with_joined_ones(table: Callable[[int, int], Any]) -> None:
    dp = StringDP("dp", canonical_spellings, table)
    assert dp.align(["▁new", "▁house"], ["Ġne", "w", "Ġhouse"]) == [(0, 1, 0, 2), (1, 2, 2, 3)]
    assert dp.align(["<0xC3>", "<0xA9>", "x"], ["é", "x"]) == [(0, 2, 0, 1), (2, 3, 1, 2)]
    assert dp.align([], ["a"]) == []


def test_string_dp_keeps_anchors_and_leaves_out_what_does_not_match() -> None:
    dp = StringDP("dp", canonical_spellings, list_table)
    pairs = dp.align(["a", "b", "c", "x", "y"], ["a", "b", "c", "z", "y"])
    assert pairs == [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3), (4, 5, 4, 5)]


def test_string_dp_reads_bytelevel_only_where_asked() -> None:
    alphabet = byte_alphabet()
    spelled = "".join({byte: character for character, byte in alphabet.items()}[byte] for byte in "中".encode())
    assert decoded_spellings(alphabet)([spelled])[0] == ["中"]
    assert canonical_spellings([spelled])[0] == [spelled]


def test_two_pointer_cuts_where_both_agree_and_refuses_other_spellings() -> None:
    walk = TwoPointer("walk", byte_alphabet())
    assert walk.align(["ab", "c", "d"], ["a", "bc", "d"]) == [(0, 2, 0, 2), (2, 3, 2, 3)]
    with pytest.raises(ValueError, match="not a ByteLevel token"):
        walk.align(["▁ab"], ["ab"])


def test_a_race_and_its_report_go_through(trained: dict[str, BenchTokenizer]) -> None:
    teacher, student, texts = trained[BYTELEVEL], trained[LLAMA], load_corpus("English", 20_000)
    pieces = pieces_of(student, texts, 1)
    rivals = StringDP("dp", canonical_spellings, list_table), TwoPointer("walk", byte_alphabet())
    found = race(teacher, student, pieces, rivals)
    assert [raced.name for raced in found[2:]] == ["dp", "walk"]
    assert found[0].coverage == found[3].coverage == 1.0
    assert "English" in race_table({"English": found})
    judged = judge(teacher, student, (cut(teacher, texts), cut(student, texts)), texts, np.arange(1024))
    pair = Pair(BYTELEVEL, LLAMA, True, {"English": judged}, {"English": 1e8})
    assert "100.0000 %" in pairs_table([pair])
    assert "English" in corpora_table([pair])


def test_goals_say_when_they_are_missed() -> None:
    assert str(Goal("coverage", False)) == "- **missed**: coverage"
    assert str(Goal("coverage", True)) == "- met: coverage"
