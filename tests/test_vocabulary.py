"""The byte tables of vocabularies, and the proof of byte lengths on texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import build_bytelevel_tokenizer, build_metaspace_tokenizer, bytes_to_unicode
from hypothesis import given
from hypothesis import strategies as st

from logitstore.byte_lengths import ByteTable, lengths_from_offsets
from logitstore.vocabulary import AddedToken, added_tokens, special_tokens, token_bytes, unknown_id


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


def test_token_bytes_reads_the_marks_of_wordpiece_and_the_unknown_token():
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "the": 1, "##re": 2, "##": 3}, "unk_token": "[UNK]"}
    tokenizer = {"model": {**model, "continuing_subword_prefix": "##"}, "decoder": {"type": "WordPiece"}}
    assert token_bytes(tokenizer) == [None, b"the", b"re", b"##"]
    assert unknown_id(tokenizer) == 0


def test_token_bytes_reads_the_end_of_word_of_older_bpe():
    model = {"type": "BPE", "vocab": {"the</w>": 0, "th": 1}, "end_of_word_suffix": "</w>"}
    assert token_bytes({"model": model, "decoder": {"type": "BPEDecoder", "suffix": "</w>"}}) == [b"the", b"th"]


def test_token_bytes_has_none_for_the_unknown_of_unigram():
    assert token_bytes({"model": {"type": "Unigram", "unk_id": 1, "vocab": [["a", -1.0], ["<unk>", 0.0]]}}) == [
        b"a",
        None,
    ]


def test_token_bytes_undoes_the_normaliser_of_added_tokens_that_are_matched_after_it():
    added = [
        {"id": 1, "content": "▁▁", "normalized": True},
        {"id": 2, "content": "▁▁▁", "normalized": False, "lstrip": True},
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": added, "normalizer": normalizer}
    assert token_bytes(tokenizer) == [b"a", b"  ", "▁▁▁".encode()]
    assert added_tokens(tokenizer)[2] == AddedToken("▁▁▁", lstrip=True)


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


def prove(pieces, text, added=()):
    """Byte lengths of a text cut into ``pieces``, those in ``added`` added tokens; else (failed token, failed byte)."""
    flags = dict(added) if isinstance(added, dict) else {index: {"special": True} for index in added}
    table = ByteTable([piece.encode() for piece in pieces], {n: AddedToken(pieces[n], **flags[n]) for n in flags})
    ids = np.arange(len(pieces), dtype=np.int32)
    lengths, token, byte = table.prove(ids, np.frombuffer(text.encode(), np.uint8))
    return lengths.tolist() if token < 0 else (token, byte)


def test_prove_accepts_the_bytes_of_the_text_and_says_where_others_begin():
    assert prove(["é", "ab"], "éab") == [2, 2]
    assert prove(["é", "ab"], "eab") == (0, 0)
    assert prove(["é", "ab"], "éax") == (1, 2)
    assert prove(["é", "ab"], "éabc") == (2, 4)
    assert prove(["é", "ab"], "éa") == (1, 2)
    assert prove([], "") == []
    assert prove([], "a") == (0, 0)


def test_prove_refuses_a_token_without_bytes():
    _, token, byte = ByteTable([b"a", None], {}).prove(np.array([0, 1]), np.frombuffer(b"a", np.uint8))
    assert (token, byte) == (1, 1)


def test_prove_takes_off_one_prepended_space_per_run():
    assert prove([" a", "b"], "ab") == [1, 1]
    assert prove([" ", "ab"], "ab") == [0, 2]
    assert prove(["  ", "ab"], "ab") == (0, 0)
    assert prove([" ", " a"], " a") == [0, 2]  # the first space is taken off although the text begins with one
    assert prove([" a", "<s>", " b"], "a<s>b", added=[1]) == [1, 3, 1]
    assert prove([" a", "<s>", " b"], " a<s> b", added=[1]) == [2, 3, 2]
    assert prove([" a", "<s>", " b"], "a<s>b") == (2, 4)


def test_prove_gives_added_tokens_the_white_space_that_they_take():
    left, right = {"lstrip": True}, {"rstrip": True}
    assert prove(["a", "<m>", "b"], "a \u3000<m>b", added={1: left}) == [1, 7, 1]
    assert prove(["a", "<m>", "b"], "a<m>\n\u00a0b", added={1: right}) == [1, 6, 1]
    assert prove(["<m>", "b"], "  <m>\t b", added={0: left | right}) == [7, 1]
    assert prove(["<m>"], " <m> ", added={0: left | right}) == [5]
    assert prove(["a", "<m>"], "a <m>", added=[1]) == (1, 1)
    assert prove(["<m>"], " x<m>", added={0: left}) == (0, 0)


@given(st.lists(st.text(max_size=5)), st.text(max_size=5), st.booleans())
def test_prove_agrees_with_joined_bytes(pieces, tail, whole):
    text = "".join(pieces) + ("" if whole else tail)
    proven = prove(pieces, text)
    if "" in pieces:
        assert isinstance(proven, tuple)
    elif text == "".join(pieces):
        assert proven == [len(piece.encode()) for piece in pieces]
    else:
        assert proven == (len(pieces), len("".join(pieces).encode()))


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
