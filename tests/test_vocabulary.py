"""The byte tables of vocabularies, and the proof of byte lengths on texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import build_bytelevel_tokenizer, build_metaspace_tokenizer, bytes_to_unicode
from hypothesis import given
from hypothesis import strategies as st

from logitstore.byte_lengths import ByteTable, lengths_from_offsets
from logitstore.vocabulary import special_tokens, token_bytes


def bytelevel_json(vocab, **parts):
    return {"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}, **parts}


def test_token_bytes_inverts_bytelevel_spelling_of_every_byte():
    spelling = bytes_to_unicode()
    table = token_bytes(bytelevel_json({spelling[byte] * 2: byte for byte in range(256)}))
    assert table == [bytes([byte, byte]) for byte in range(256)]


def test_token_bytes_gives_none_to_special_tokens_and_to_ids_without_a_token():
    added = [
        {"id": 3, "content": "<|end|>", "special": True},
        {"id": 5, "content": "<think>…", "special": False},
    ]
    tokenizer = bytelevel_json({"a": 0, "Ġb": 1, "<|end|>": 3, "ab c": 4}, added_tokens=added)
    # "ab c" holds a character that spells no byte.
    assert token_bytes(tokenizer) == [b"a", b" b", None, None, None, "<think>…".encode()]
    assert special_tokens(tokenizer) == {3: "<|end|>"}


@pytest.mark.parametrize("kind", ["decoder", "pre_tokenizer"])
def test_token_bytes_finds_bytelevel_within_a_sequence(kind):
    inner = {"decoder": "decoders", "pre_tokenizer": "pretokenizers"}[kind]
    steps = {"type": "Sequence", inner: [{"type": "Split"}, {"type": "ByteLevel"}]}
    assert token_bytes({"model": {"vocab": {"Ċ": 0}}, kind: steps}) == [b"\n"]


def test_token_bytes_reads_metaspace_and_byte_fallback():
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    tokenizer = {"model": {"vocab": {"<0x0A>": 0, "▁the": 1, "é▁": 2, "<0xZZ>": 3}}, "decoder": decoder}
    assert token_bytes(tokenizer) == [b"\n", b" the", "é ".encode(), b"<0xZZ>"]


def test_token_bytes_reads_unigram_with_metaspace_and_no_byte_fallback():
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["_the", -1.5], ["<0x0A>", -2.0]]}
    decoder = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}
    assert token_bytes({"model": model, "decoder": decoder}) == [b"<unk>", b" the", b"<0x0A>"]


@pytest.mark.parametrize("build", [build_bytelevel_tokenizer, build_metaspace_tokenizer])
def test_token_bytes_agrees_with_the_tokenizers_own_decoder(tmp_path, build):
    import tokenizers

    folder = build(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    table = token_bytes(json.loads((tmp_path / "tokenizer.json").read_text()))
    assert len(table) == tokenizer.get_vocab_size()
    pad = tokenizer.token_to_id("T")  # keeps the space of a token from being the one that decoders strip
    for index, data in enumerate(table):
        if data is None:
            assert index in tokenizer.get_added_tokens_decoder()
        elif "\ufffd" not in tokenizer.decode([index]):
            assert tokenizer.decode([pad, index]) == "T" + data.decode()


def prove(pieces, text, special=()):
    """Byte lengths of a text cut into ``pieces``; those in ``special`` are special tokens."""
    table = ByteTable([piece.encode() for piece in pieces], {n: pieces[n] for n in special})
    lengths = table.prove(np.arange(len(pieces), dtype=np.int32), text.encode())
    return None if lengths is None else lengths.tolist()


def test_prove_accepts_the_bytes_of_the_text_and_nothing_else():
    assert prove(["é", "ab"], "éab") == [2, 2]
    assert prove(["é", "ab"], "eab") is None
    assert prove(["é", "ab"], "éabc") is None
    assert prove([], "") == []
    assert prove([], "a") is None


def test_prove_refuses_a_token_without_bytes():
    assert ByteTable([b"a", None], {}).prove(np.array([0, 1]), b"a") is None


def test_prove_takes_off_one_prepended_space_per_run():
    assert prove([" a", "b"], "ab") == [1, 1]
    assert prove([" ", "ab"], "ab") == [0, 2]
    assert prove(["  ", "ab"], "ab") is None
    assert prove([" a", "<s>", " b"], "a<s>b", special=[1]) == [1, 3, 1]
    assert prove([" a", "<s>", " b"], " a<s> b", special=[1]) == [2, 3, 2]
    assert prove([" a", "<s>", " b"], "a<s>b") is None


@given(st.text(), st.data())
def test_lengths_from_offsets_sum_up_whatever_the_offsets(text, data):
    ends = data.draw(st.lists(st.integers(0, len(text)), min_size=1))
    lengths = lengths_from_offsets(ends, text)
    assert lengths.dtype == np.int32
    assert lengths.min() >= 0
    assert lengths.sum() == len(text.encode())


@given(st.text(min_size=1))
def test_lengths_from_offsets_are_exact_for_whole_characters(text):
    lengths = lengths_from_offsets(range(1, len(text) + 1), text)
    assert lengths.tolist() == [len(character.encode()) for character in text]


def test_lengths_from_offsets_share_a_character_among_its_tokens():
    assert lengths_from_offsets([1, 2, 2, 2, 2, 3], "a🎉b").tolist() == [1, 1, 1, 1, 1, 1]
    assert lengths_from_offsets([2, 1, 3], "éab").tolist() == [1, 2, 1]  # the second ends before the first: made equal
    assert lengths_from_offsets([1, 2], "abc").tolist() == [1, 2]
