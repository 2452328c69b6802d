"""Byte ends under tokenizers that normalise: what each token is given normalises to that token."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from builders import TEXTS, build_bytelevel_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from logitstore.byte_ends import Proof
from logitstore.documents import Document, Segment
from logitstore.tokenizer import Tokenizer

WORDS = (
    *TEXTS,
    "office fiancé naïve Ångström İstanbul ΣΊΣΥΦΟΣ Straße full-width 123 kg 1/2",
    "مُحَمَّدٌ يَكْتُبُ كِتَابًا مرحبا بالعالم",
    "日本語の文章です。 がぎぐげご 你好世界 안녕하세요",
    "จำนวน านวน คำ",
)
TEXT_KINDS = {
    "english": "The Quick brown FOX; it's 1024.\n\n\tNew   line\r\n",
    "accents": "Fiancé naïve e\u0301lan cafe\u0301 A\u030angstro\u0308m",
    "cjk": "你好，世界。日本語の文章です。か\u3099 ｶﾞ",
    "hangul": "안녕하세요 \u1112\u1161\u11ab",
    "arabic": "مُحَمَّدٌ يَكْتُبُ كِتَابًا",
    "emoji": "👩\u200d👩\u200d👧\u200d👦 🎉🚀 ❤\ufe0f ok",
    "ligatures": "oﬃce ﬁancé ﬂ",
    "widths": "１２３　ＡＢＣ ㎏ ①",
    "case": "İstanbul STRASSE straße ΣΊΣΥΦΟΣ",
    "controls": "a\u0000b\u200b c\ufeff\u00add",
    "sara am": "จำนวน คำนาม",  # decomposed, its second part may begin a token of what follows
    "sorted marks": "م\u0651\u064eر g\u0323\u0306a",
    "replacements": "a\ufffdb c\u0345z d",
}
MARKS = "".join(chr(point) for point in range(0x300, 0x370)) + "\ufe0f"


def wordpiece(normalizer, pre_tokenizer=None, vocab_size=700):
    tokenizer = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def unigram(normalizer):
    tokenizer = FastTokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def bytelevel(folder, normalizer):
    tokenizer = FastTokenizer.from_file(f"{build_bytelevel_tokenizer(folder, chat_template=None)}/tokenizer.json")
    tokenizer.normalizer = normalizer
    return tokenizer


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The fast tokenizer of each kind, and ours."""
    accents = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    spaces = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])
    kinds = {
        "bert": lambda _: wordpiece(normalizers.BertNormalizer(lowercase=True)),
        "nfkc-lower": lambda _: wordpiece(
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), pre_tokenizers.Whitespace()
        ),
        "unigram-nfkc": lambda _: unigram(spaces),
        "unigram-accents": lambda _: unigram(accents),
        "bytelevel-nfc": lambda folder: bytelevel(folder, normalizers.NFC()),
        "bytelevel-nfkc-lower": lambda folder: bytelevel(
            folder, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        ),
    }
    built = {}

    def get(kind):
        if kind not in built:
            folder = tmp_path_factory.mktemp(kind)
            fast = kinds[kind](folder)
            fast.save(str(folder / "tokenizer.json"))
            built[kind] = fast, Tokenizer.from_folder(folder)
        return built[kind]

    return get


KINDS = ["bert", "nfkc-lower", "unigram-nfkc", "unigram-accents", "bytelevel-nfc", "bytelevel-nfkc-lower"]


def tokenize(tokenizer, text):
    [tokens] = tokenizer.tokenize([Document((Segment("text", text),))])
    return tokens


def bare(text):
    """A text without what normalisers drop or add at will."""
    kept = [symbol for symbol in unicodedata.normalize("NFKD", text) if unicodedata.category(symbol)[0] not in "MCZ"]
    return "".join(kept).replace("▁", "")


@pytest.mark.parametrize("text", TEXT_KINDS.values(), ids=TEXT_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_token_is_given_normalises_to_that_token(load, kind, text):
    fast, tokenizer = load(kind)
    tokens = tokenize(tokenizer, text)
    assert tokens.proof is not Proof.NONE
    assert tokens.byte_lengths.sum() == len(text.encode())
    unknown = {fast.token_to_id("[UNK]"), fast.token_to_id("<unk>")} - {None}
    data, begin, spelled = text.encode(), 0, b""
    ends = np.cumsum(tokens.byte_lengths).tolist()
    for token, (index, end) in enumerate(zip(tokens.ids.tolist(), ends, strict=True)):
        if index in unknown:
            assert end > begin
            begin, spelled = end, b""
            continue
        spelled += tokenizer.token_bytes[index] or b""
        if ends[token + 1 : token + 2] == [end]:  # the next one ends here, too: no place of the text is between them
            continue
        try:
            found, given_text = bare(spelled.decode()), data[begin:end].decode()
        except UnicodeDecodeError:  # cut within a character: looked at with what follows
            continue
        assert found == bare(fast.normalizer.normalize_str(given_text))
        begin, spelled = end, b""
    assert (begin, spelled) == (len(data), b"")


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("bert", "a  b", ["a", "  b"]),
        ("bert", "e\u0301 a \n", ["e\u0301", " a \n"]),
        ("bert", "مُ", ["مُ"]),
        ("unigram-nfkc", " a", [" a"]),
    ],
)
def test_dropped_accents_go_to_their_base_and_dropped_spaces_to_the_next_token(load, kind, text, expected):
    _, tokenizer = load(kind)
    tokens = tokenize(tokenizer, text)
    ends = np.cumsum(tokens.byte_lengths).tolist()
    assert {len("".join(expected[: n + 1]).encode()) for n in range(len(expected))} <= set(ends)


def test_tokens_of_one_character_end_together_unless_it_is_cut_as_it_stands(load):
    _, tokenizer = load("bytelevel-nfkc-lower")
    ends = tokenizer.byte_ends(tokenizer.encode_text("㎏"), "㎏")
    assert (ends.ends.tolist(), ends.proof) == ([3, 3], Proof.CHARACTERS)
    text = "K🦜"  # lower-cased, so not proven by bytes; the bird is cut into 2 + 1 + 1 bytes
    ends = tokenizer.byte_ends(tokenizer.encode_text(text), text)
    assert (ends.ends.tolist(), ends.proof) == ([1, 3, 4, 5], Proof.CHARACTERS)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cn"]), min_size=1, max_size=40))
def test_lengths_of_any_text_sum_up_and_never_decrease(load, kind, text):
    _, tokenizer = load(kind)
    ids = tokenizer.encode_text(text)
    ends = tokenizer.byte_ends(ids, text)
    assert len(ends.ends) == len(ids)
    if ids:
        assert (np.diff(ends.ends, prepend=0) >= 0).all()
        assert ends.ends[-1] == len(text.encode())


def test_byte_ends_say_where_the_bytes_first_fail(load):
    _, tokenizer = load("bytelevel-nfc")
    exact = tokenizer.byte_ends(tokenizer.encode_text("a b"), "a b")
    assert (exact.proof, exact.failed_token, exact.failed_byte) == (Proof.BYTES, None, None)
    ids = tokenizer.encode_text("ab é")
    changed = tokenizer.byte_ends(ids, "ab e\u0301")
    assert changed.proof is Proof.CHARACTERS
    assert changed.ends[-1] == len("ab e\u0301".encode())
    assert changed.failed_byte in (2, 3)
    other = tokenizer.byte_ends(ids, "ab xyz")
    assert other.proof is Proof.NONE
    assert other.ends[-1] == 6
    assert other.failed_byte in (2, 3)


def test_byte_ends_refuse_ids_of_another_vocabulary(load):
    from logitstore.errors import TokenizerError

    _, tokenizer = load("bert")
    with pytest.raises(TokenizerError, match=r"expected token ids below \d+, found 100000"):
        tokenizer.byte_ends([100_000], "a")


@pytest.mark.parametrize("text", ["a" * 1_000_000, "Ж" * 1_000_000, " " * 999_999 + "a", "龍" * 300_000], ids=len)
def test_a_megabyte_of_one_character_is_proven(load, text):
    _, tokenizer = load("bert")
    assert tokenize(tokenizer, text).proof is Proof.CHARACTERS


def test_a_tokenizer_that_drops_everything_leaves_a_text_unproven(tmp_path):
    tokenizer = bytelevel(tmp_path, normalizers.Replace(Regex("[a-y]"), ""))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = tokenize(Tokenizer.from_folder(tmp_path), "abcxyz" * 100_000 + "z")
    assert tokens.proof is Proof.NONE
    assert tokens.byte_lengths.sum() == 600_001
