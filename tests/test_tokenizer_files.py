"""Tokenizers from files other than tokenizer.json, and from loaded ones: the ids of whoever wrote the file."""

from __future__ import annotations

import base64
import io
import json
import shutil

import pytest
from builders import CHATML_TEMPLATE, TEXTS, build_bytelevel_tokenizer, mistral_data
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.byte_ends import Proof
from logitstore.documents import Document, Segment
from logitstore.errors import TokenizerError
from logitstore.tokenizer import Tokenizer

TEXT_KINDS = {
    "english": 'The quick brown fox; it\'s "1,024" dollars.  Two  spaces, and a very-hyphenated word.',
    "code": "def f(x: int) -> str:\n\tif x == 0:\n        return f'{x!r}'  # done\n\n\n",
    "chinese": "你好，世界。今天天气很好，我们去公园散步吧！",
    "arabic": "مُحَمَّدٌ يَكْتُبُ كِتَابًا مرحبا بالعالم",
    "emoji": "👩\u200d👩\u200d👧\u200d👦 🎉🚀❤\ufe0f 🇫🇷",
    "crlf": "one\r\ntwo\r\n\r\n\tthree\r",
    "spelled": "<s> </s> [INST] <unk> <0x41> <|im_end|>",
    "spaces": "  leading, trailing   ",
    "marks": "e\u0301 ǅ ﬁ ① ㎏ が \u00ad",
}

# Unassigned characters are left out: which properties they have depends on a library's version of Unicode.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60)


def tokenize(tokenizer, text):
    [tokens] = tokenizer.tokenize([Document((Segment("text", text),))])
    return tokens


@pytest.fixture(scope="module")
def llama():
    """Mistral's 32k SentencePiece model, ours and the library's own."""
    pytest.importorskip("mistral_common")
    sentencepiece = pytest.importorskip("sentencepiece")
    file = mistral_data() / "tokenizer.model.v1"
    return Tokenizer.from_folder(file), sentencepiece.SentencePieceProcessor(model_file=str(file))


@pytest.fixture(scope="module")
def tekken():
    """Mistral's 131k tekken vocabulary, ours and the library's own."""
    pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = mistral_data() / "tekken_240911.json"
    return Tokenizer.from_folder(file), Tekkenizer.from_file(file)


@pytest.mark.parametrize("text", TEXT_KINDS.values(), ids=TEXT_KINDS)
def test_a_sentencepiece_model_gives_its_librarys_ids(llama, text):
    tokenizer, reference = llama
    assert tokenizer.encode_text(text) == reference.encode(text)
    assert tokenize(tokenizer, text).proof is Proof.BYTES


@given(text=ANY_TEXT)
def test_a_sentencepiece_model_gives_its_librarys_ids_of_any_text(llama, text):
    tokenizer, reference = llama
    assert tokenizer.encode_text(text) == reference.encode(text)


def test_a_sentencepiece_model_brings_its_special_tokens(llama):
    tokenizer, reference = llama
    assert (tokenizer.vocab_size, tokenizer.bos_ids, tokenizer.eos_ids) == (32000, (1,), (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    for index in range(3, 32000, 97):
        piece = reference.id_to_piece(index)
        expected = bytes([int(piece[3:5], 16)]) if reference.is_byte(index) else piece.replace("▁", " ").encode()
        assert tokenizer.token_bytes[index] == expected


@pytest.mark.parametrize("text", TEXT_KINDS.values(), ids=TEXT_KINDS)
def test_a_tekken_file_gives_its_librarys_ids(tekken, text):
    tokenizer, reference = tekken
    assert tokenizer.encode_text(text) == reference.encode(text, bos=False, eos=False)
    assert tokenize(tokenizer, text).proof is Proof.BYTES


@given(text=ANY_TEXT)
def test_a_tekken_file_gives_its_librarys_ids_of_any_text(tekken, text):
    tokenizer, reference = tekken
    assert tokenizer.encode_text(text) == reference.encode(text, bos=False, eos=False)


def test_a_tekken_file_brings_its_special_tokens(tekken):
    tokenizer, reference = tekken
    assert (tokenizer.vocab_size, tokenizer.bos_ids, tokenizer.eos_ids) == (131072, (1,), (2,))
    assert tokenizer.special_ids == frozenset(range(1000))
    assert [tokenizer.token_text(index) for index in (3, 4, 999)] == ["[INST]", "[/INST]", "<SPECIAL_999>"]
    assert tokenizer.roles.pad == reference.get_special_token("<pad>")
    for index in range(1000, 131072, 397):
        assert tokenizer.token_bytes[index] == reference.id_to_byte_piece(index)


def train(**options):
    """A small SentencePiece model, as bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentences = iter([*TEXTS * 20, *["brackets [a]/b, {c} <d> or e_f | g"] * 20, *TEXT_KINDS.values()])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        character_coverage=1.0,
        **options,
    )
    return model.getvalue()


MODELS = {
    "unigram-nmt-nfkc": {"model_type": "unigram", "vocab_size": 300},
    "unigram-bytes": {"model_type": "unigram", "vocab_size": 500, "byte_fallback": True},
    "unigram-plain": {
        "model_type": "unigram",
        "vocab_size": 300,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "bpe-nfkc-lower": {"model_type": "bpe", "vocab_size": 400, "normalization_rule_name": "nfkc_cf"},
    "char": {"model_type": "char", "vocab_size": 200},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    built = {}

    def get(name):
        if name not in built:
            import sentencepiece

            file = tmp_path_factory.mktemp(name) / "tokenizer.model"
            file.write_bytes(train(**MODELS[name]))
            reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
            built[name] = Tokenizer.from_folder(file.parent), reference
        return built[name]

    return get


@pytest.mark.parametrize("text", TEXT_KINDS.values(), ids=TEXT_KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_sentencepiece_model_gives_its_librarys_ids(trained, name, text):
    tokenizer, reference = trained(name)
    assert tokenizer.encode_text(text) == reference.encode(text)
    assert tokenize(tokenizer, text).proof is not Proof.NONE


@pytest.mark.parametrize("name", ["unigram-plain", "char"])
@settings(max_examples=50)
@given(text=st.text("ab the\nquick ▁é你<0x41>", max_size=30))
def test_every_kind_of_sentencepiece_model_gives_its_librarys_ids_of_any_text(trained, name, text):
    tokenizer, reference = trained(name)
    assert tokenizer.encode_text(text) == reference.encode(text)


def tiktoken_folder(folder, **config):
    """The ranks of a small ByteLevel vocabulary as lines, and a configuration."""
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(folder / "source"))
    tokens = [data for data in tokenizer.token_bytes if data is not None]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    (folder / "small.tiktoken").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {token: rank for rank, token in enumerate(tokens)}


PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@pytest.mark.parametrize("key", ["pat_str", "pattern"])
def test_a_tiktoken_file_gives_its_librarys_ids(tmp_path, key):
    tiktoken = pytest.importorskip("tiktoken")
    added = {"500": {"content": "<|end|>"}, "501": {"content": "<think>", "special": False}}
    ranks = tiktoken_folder(tmp_path, **{key: PATTERN, "added_tokens_decoder": added, "eos_token": "<|end|>"})
    reference = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in TEXT_KINDS.values():
        assert tokenizer.encode_text(text) == reference.encode(text)
    assert (tokenizer.eos_ids, tokenizer.special_ids) == ((500,), {500})
    assert tokenizer.encode_text("<think>") == [501]


def test_a_rank_file_is_known_by_its_content(tmp_path):
    tiktoken_folder(tmp_path, pat_str=PATTERN)
    shutil.move(tmp_path / "small.tiktoken", tmp_path / "tokenizer.model")
    assert Tokenizer.from_folder(tmp_path).encode_text("ab")


def test_files_that_cannot_be_read_are_refused_in_a_sentence(tmp_path):
    def message(path):
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_folder(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    tiktoken_folder(tmp_path)
    assert "expected the pattern that splits texts under pat_str" in message(tmp_path)
    (tmp_path / "small.tiktoken").write_bytes(b"YQ== 0\nnonsense\n")
    assert "small.tiktoken: line 2: expected base64 and a rank, found b'nonsense'" in message(tmp_path)
    (tmp_path / "other.tiktoken").write_bytes(b"")
    assert "expected one tokenizer, found other.tiktoken, small.tiktoken: name one" in message(tmp_path)
    (tmp_path / "broken.model").write_bytes(b"\x0a\xff\x01 nothing of the kind")
    assert "expected a SentencePiece model, but its bytes are not one" in message(tmp_path / "broken.model")
    (tmp_path / "empty.model").write_bytes(b"")
    assert "found no pieces" in message(tmp_path / "empty.model")
    (tmp_path / "tekken.json").write_text(json.dumps({"vocab": [], "config": {"pattern": "."}}))
    assert "expected a tekken vocabulary, but KeyError: 'default_num_special_tokens'" in message(tmp_path)


def test_a_word_model_is_refused(tmp_path):
    file = tmp_path / "word.model"
    file.write_bytes(train(model_type="word", vocab_size=50))
    with pytest.raises(TokenizerError, match=r"word\.model: .* found model type 3; save a tokenizer\.json"):
        Tokenizer.from_folder(file)


def test_loaded_tokenizers_are_those_of_their_folder(tmp_path):
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import AutoTokenizer

    folder = build_bytelevel_tokenizer(tmp_path)
    expected = Tokenizer.from_folder(folder)
    ours = Tokenizer.from_loaded(AutoTokenizer.from_pretrained(folder))
    assert (ours.fingerprint, ours.rendering(), ours.roles) == (
        expected.fingerprint,
        expected.rendering(),
        expected.roles,
    )
    bare = Tokenizer.from_loaded(FastTokenizer.from_file(f"{folder}/tokenizer.json"), CHATML_TEMPLATE)
    assert (bare.fingerprint, bare.bos_ids, bare.eos_ids) == (expected.fingerprint, expected.bos_ids, ())
    assert bare.template_asset() == CHATML_TEMPLATE.encode()
    with pytest.raises(TokenizerError, match=r"found object: load it with AutoTokenizer"):
        Tokenizer.from_loaded(object())
