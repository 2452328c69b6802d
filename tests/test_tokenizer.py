"""Tokenizers: lossless byte lengths, special tokens, and identity through what a store keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from builders import (
    CHATML_TEMPLATE,
    build_bytelevel_tokenizer,
    build_metaspace_tokenizer,
    build_sentencepiece_tokenizer,
    build_tekken_tokenizer,
    mistral_data,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from logitstore.byte_ends import Proof
from logitstore.documents import Document, Segment
from logitstore.errors import TokenizerError
from logitstore.tokenizer import Tokenizer

BOS, EOS, IM_START, IM_END = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of each kind of tokenizer, built when first asked for."""
    builders = {
        "bytelevel": build_bytelevel_tokenizer,
        "metaspace": build_metaspace_tokenizer,
        "tekken": lambda folder: build_tekken_tokenizer(folder, num_tokens=6000),
        "sentencepiece": build_sentencepiece_tokenizer,
    }
    built: dict[str, str] = {}

    def get(kind):
        if kind in {"tekken", "sentencepiece"}:
            pytest.importorskip("mistral_common")
        if kind == "sentencepiece":
            pytest.importorskip("sentencepiece")
        if kind not in built:
            built[kind] = builders[kind](tmp_path_factory.mktemp(kind))
        return built[kind]

    return get


@pytest.fixture(scope="module")
def load(folder):
    loaded: dict[str, Tokenizer] = {}

    def get(kind):
        if kind not in loaded:
            loaded[kind] = Tokenizer.from_folder(folder(kind))
        return loaded[kind]

    return get


LOSSLESS = ["bytelevel", "metaspace", "tekken", "sentencepiece"]


def text_document(text, source=""):
    return Document((Segment("text", text),), source)


def chat_document(*contents):
    return Document(tuple(Segment("assistant" if n % 2 else "user", content) for n, content in enumerate(contents)))


def bytes_of(tokenizer, tokens):
    """What the tokens with bytes stand for, put together."""
    pieces = [tokenizer.token_bytes[index] for index in tokens.ids.tolist()]
    return b"".join(piece for piece, length in zip(pieces, tokens.byte_lengths, strict=True) if piece and length)


def write_tokenizer(folder, tokenizer, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(str(folder))


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(deadline=None)
# U+2581 is how metaspace tokenizers write a space: they cannot tell it from one.
@given(texts=st.lists(st.text(st.characters(exclude_characters="▁", codec="utf-8")), min_size=1, max_size=4))
@example(texts=["👩‍👩‍👧 e\u0301 \r\n\r\n x\t\n", "   ", " a", "\u0000", "</s><|im_end|>", "<0x41>", "مرحبا 你好"])
def test_tokenize_is_lossless_on_any_text(load, kind, texts):
    tokenizer = load(kind)
    documents = [text_document(text) for text in texts]
    for document, tokens in zip(documents, tokenizer.tokenize(documents), strict=True):
        assert tokens.exact
        assert tokens.ids.dtype == tokens.byte_lengths.dtype == np.int32
        assert tokens.byte_lengths.sum() == document.num_bytes
        assert (tokens.ids[0], tokens.ids[-1]) == (*tokenizer.bos_ids, *tokenizer.eos_ids)
        text = document.text.encode()
        assert bytes_of(tokenizer, tokens) in (text, b" " + text)


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(deadline=None)
@given(contents=st.lists(st.text(st.characters(exclude_characters="▁", codec="utf-8")), min_size=1, max_size=4))
@example(contents=["<|im_end|>\n<|im_start|>system", " </s>"])
def test_tokenize_is_lossless_on_any_chat(load, kind, contents):
    document = chat_document(*contents)
    [tokens] = load(kind).tokenize([document])
    assert tokens.exact
    assert tokens.byte_lengths.sum() == document.num_bytes
    ends = np.cumsum(tokens.byte_lengths).tolist()
    edges = np.cumsum([len(content.encode()) for content in contents]).tolist()
    assert set(edges) <= {0, *ends}  # no token covers two messages


@pytest.mark.parametrize("kind", ["bytelevel", "metaspace", "sentencepiece"])
def test_tokenize_a_chat_equals_transformers(folder, load, kind):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder(kind))
    contents = ["What is 2 + 2?", " It is 4.\n\nAnything else? ", "s"]
    document = chat_document(*contents)
    messages = [{"role": segment.role, "content": segment.content} for segment in document.segments]
    expected = reference.apply_chat_template(messages)["input_ids"]
    [tokens] = load(kind).tokenize([document])
    assert tokens.ids.tolist() == [*load(kind).bos_ids, *expected]


def test_tokenize_text_equals_sentencepiece(load):
    tokenizer = load("sentencepiece")
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(mistral_data() / "tokenizer.model.v1"))
    text = "Real merges, real bytes: naïve café 🎉,\n\tand two  spaces."
    [tokens] = tokenizer.tokenize([text_document(text)])
    assert tokens.ids.tolist()[1:-1] == model.encode(text)


def test_tokenize_keeps_special_tokens_of_the_template_apart_from_their_spelling_in_contents(load):
    tokenizer = load("bytelevel")
    [plain, chat] = tokenizer.tokenize([text_document("a<|im_end|>b"), chat_document("a<|im_end|>b", "c")])
    assert plain.ids.tolist().count(IM_END) == 0
    assert chat.ids.tolist().count(IM_END) == 2
    assert chat.ids.tolist().count(IM_START) == 2
    assert bytes_of(tokenizer, chat) == b"a<|im_end|>bc"


def test_tokenize_cuts_prompt_and_completion_as_one_string(load):
    tokenizer = load("bytelevel")
    whole = text_document("The quick brown")
    halves = Document((Segment("prompt", "The qui"), Segment("completion", "ck brown")))
    first, second = tokenizer.tokenize([whole, halves])
    assert np.array_equal(first.ids, second.ids)


def test_tokenize_does_not_repeat_the_bos_of_a_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path, chat_template=template))
    [tokens] = tokenizer.tokenize([chat_document("a", "b")])
    assert tokens.ids.tolist().count(BOS) == 1
    assert tokens.ids.tolist().count(EOS) == 2


def test_tokenize_keeps_the_order_of_mixed_documents(load):
    tokenizer = load("bytelevel")
    documents = [text_document("one"), chat_document("two"), text_document("three"), chat_document("four")]
    assert [bytes_of(tokenizer, tokens).decode() for tokens in tokenizer.tokenize(documents)] == [
        document.text for document in documents
    ]
    assert tokenizer.tokenize([]) == []


def test_tokenize_a_chat_with_a_template_that_strips_is_proven_by_characters_and_whole(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path, chat_template=template))
    for contents in (["  é ", "b\n"], [" ", "x"], [" "]):
        document = chat_document(*contents)
        [tokens] = tokenizer.tokenize([document])
        # Of whitespace alone nothing is left, and no token is known to stand for it.
        assert tokens.proof == (Proof.NONE if contents == [" "] else Proof.CHARACTERS)
        assert tokens.byte_lengths.sum() == document.num_bytes


def test_tokenize_a_chat_without_a_template_says_how_to_give_one(tmp_path):
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(TokenizerError, match=r"no chat template: give one with --chat-template FILE"):
        tokenizer.tokenize([chat_document("x")])
    given_one = Tokenizer.from_folder(str(tmp_path), chat_template=CHATML_TEMPLATE)
    assert given_one.tokenize([chat_document("x")])[0].exact
    assert given_one.fingerprint == tokenizer.fingerprint


def test_tokenize_with_a_normalizer_is_proven_by_bytes_only_where_it_changes_nothing(tmp_path):
    tokenizer = FastTokenizer.from_file(f"{build_bytelevel_tokenizer(tmp_path / 'a')}/tokenizer.json")
    tokenizer.normalizer = normalizers.NFC()
    normalising = write_tokenizer(tmp_path / "b", tokenizer, eos_token="</s>")
    documents = [text_document("caf\u00e9"), text_document("Z e\u0301 e\u0301\u0301 Z")]
    same, changed = normalising.tokenize(documents)
    assert (same.proof, changed.proof) == (Proof.BYTES, Proof.CHARACTERS)
    assert changed.byte_lengths.sum() == documents[1].num_bytes
    assert changed.byte_lengths[[1, -2]].tolist() == [1, 1]  # Z and Z


def test_tokenize_with_wordpiece_is_proven_by_characters(tmp_path):
    tokenizer = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    loaded = write_tokenizer(tmp_path, tokenizer)
    documents = [text_document("The  quick\nfox!\n"), text_document("ÉLAN 🎉")]
    for document, tokens in zip(documents, loaded.tokenize(documents), strict=True):
        assert tokens.proof is Proof.CHARACTERS
        assert tokens.byte_lengths.sum() == document.num_bytes
    with pytest.raises(TokenizerError, match=r"a\.txt: the tokenizer makes no tokens of '  '"):
        loaded.tokenize([text_document("  ", source="a.txt")])


def test_tokenize_gives_bytes_without_tokens_to_eos(tmp_path):
    tokenizer = FastTokenizer.from_file(f"{build_bytelevel_tokenizer(tmp_path / 'a')}/tokenizer.json")
    tokenizer.normalizer = normalizers.Strip()
    stripping = write_tokenizer(tmp_path / "b", tokenizer, eos_token="</s>")
    [tokens] = stripping.tokenize([text_document(" \n ")])
    assert (tokens.ids.tolist(), tokens.byte_lengths.tolist(), tokens.exact) == ([BOS, EOS], [0, 3], False)


def test_tokenize_with_unigram_is_exact(tmp_path):
    tokenizer = FastTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    loaded = write_tokenizer(tmp_path, tokenizer)
    known, unknown = loaded.tokenize([text_document("the lazy fox"), text_document("the 🎉 fox")])
    assert (known.proof, unknown.proof) == (Proof.BYTES, Proof.CHARACTERS)
    ends = np.cumsum(unknown.byte_lengths).tolist()
    assert {3, len("the 🎉".encode())} <= set(ends)
    assert b'{"$float":"' in loaded.asset()
    assert Tokenizer.from_asset(loaded.asset()).asset() == loaded.asset()


def test_bos_comes_from_the_post_processor_or_the_configuration(tmp_path):
    folder = build_bytelevel_tokenizer(tmp_path / "a")
    assert Tokenizer.from_folder(folder).bos_ids == (BOS,)
    tokenizer = FastTokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.post_processor = processors.ByteLevel()  # adds nothing
    assert write_tokenizer(tmp_path / "b", tokenizer, bos_token="<s>").bos_ids == ()
    assert write_tokenizer(tmp_path / "c", tokenizer, bos_token="<s>", add_bos_token=True).bos_ids == (BOS,)
    assert write_tokenizer(tmp_path / "d", tokenizer).eos_ids == ()


def test_special_tokens_are_read_from_the_special_tokens_map(tmp_path):
    build_bytelevel_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>", "lstrip": false}}')
    assert Tokenizer.from_folder(str(tmp_path)).eos_ids == (IM_END,)


@pytest.mark.parametrize("kind", LOSSLESS)
def test_from_asset_restores_an_identical_tokenizer(load, kind):
    tokenizer = load(kind)
    rendering = json.loads(json.dumps(tokenizer.rendering()))
    restored = Tokenizer.from_asset(tokenizer.asset(), rendering, tokenizer.template_asset())
    assert restored.fingerprint == tokenizer.fingerprint
    assert restored.rendering() == tokenizer.rendering()
    assert restored.template_asset() == tokenizer.template_asset()
    assert restored.token_bytes == tokenizer.token_bytes
    assert restored.special_ids == tokenizer.special_ids
    documents = [text_document("naïve\r\n🎉  text"), chat_document("hi", " there")]
    for before, after in zip(tokenizer.tokenize(documents), restored.tokenize(documents), strict=True):
        assert np.array_equal(before.ids, after.ids)
        assert np.array_equal(before.byte_lengths, after.byte_lengths)


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece"])
def test_save_writes_a_folder_that_loads_as_the_same_tokenizer(load, tmp_path, kind):
    tokenizer = load(kind)
    tokenizer.save(tmp_path)
    saved = Tokenizer.from_folder(tmp_path)
    assert saved.asset() == tokenizer.asset()
    assert saved.rendering() == tokenizer.rendering()


def test_from_asset_restores_what_a_template_asks_for(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ pad_token }}{% endfor %}"
    build_bytelevel_tokenizer(tmp_path, chat_template=template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|im_end|>"}))
    tokenizer = Tokenizer.from_folder(str(tmp_path))
    restored = Tokenizer.from_asset(tokenizer.asset(), tokenizer.rendering(), tokenizer.template_asset())
    assert restored.tokenize([chat_document("a")])[0].ids.tolist()[-1] == IM_END
    restored.save(tmp_path / "saved")
    assert Tokenizer.from_folder(tmp_path / "saved").rendering() == tokenizer.rendering()


def test_from_asset_refuses_another_template_and_another_version(load):
    tokenizer = load("bytelevel")
    with pytest.raises(TokenizerError, match="chat template: expected digest"):
        Tokenizer.from_asset(tokenizer.asset(), tokenizer.rendering(), b"{{ messages }}")
    with pytest.raises(TokenizerError, match="update logitstore"):
        Tokenizer.from_asset(tokenizer.asset(), {**tokenizer.rendering(), "version": "2"}, tokenizer.template_asset())


def test_fingerprint_ignores_padding_truncation_order_and_the_spelling_of_merges(tmp_path):
    folder = build_bytelevel_tokenizer(tmp_path / "a")
    fingerprint = Tokenizer.from_folder(folder).fingerprint
    tokenizer = FastTokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_padding(pad_id=1, pad_token="</s>")
    tokenizer.enable_truncation(7)
    padded = write_tokenizer(tmp_path / "b", tokenizer, eos_token="</s>")
    assert padded.fingerprint == fingerprint
    assert len(padded.tokenize([text_document("more than seven tokens of text")])[0].ids) > 7
    parsed = json.loads((tmp_path / "a/tokenizer.json").read_text())
    parsed["model"]["merges"] = [" ".join(merge) for merge in parsed["model"]["merges"]]
    reordered = {name: parsed[name] for name in sorted(parsed, reverse=True)}
    (tmp_path / "b/tokenizer.json").write_text(json.dumps(reordered, indent=4, ensure_ascii=True))
    assert Tokenizer.from_folder(str(tmp_path / "b")).fingerprint == fingerprint


def test_fingerprint_changes_with_behaviour(tmp_path):
    folder = build_bytelevel_tokenizer(tmp_path / "a")
    tokenizer = FastTokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.normalizer = normalizers.NFC()
    changed = write_tokenizer(tmp_path / "b", tokenizer)
    assert changed.fingerprint != Tokenizer.from_folder(folder).fingerprint


def test_token_text_is_printable(load):
    tokenizer = load("bytelevel")
    shown = {data: tokenizer.token_text(index) for index, data in enumerate(tokenizer.token_bytes) if data is not None}
    assert (shown[b"\n"], shown[b" "], shown[b"\xff"], shown[b"\t"]) == ("⏎", " ", "\\xff", "\\t")
    assert tokenizer.token_text(IM_END) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == "[1000000]"
    assert all(tokenizer.token_text(index).isprintable() for index in range(tokenizer.vocab_size))


def test_from_folder_takes_the_file_itself(tmp_path):
    folder = build_metaspace_tokenizer(tmp_path)
    by_file, by_folder = Tokenizer.from_folder(f"{folder}/tokenizer.json"), Tokenizer.from_folder(folder)
    assert by_file.rendering() == by_folder.rendering()


def test_from_folder_says_what_is_wrong(tmp_path):
    def message():
        with pytest.raises(TokenizerError) as caught:
            Tokenizer.from_folder(str(tmp_path))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert (
        "no tokenizer.json there, nor tekken.json, *.tiktoken or tokenizer.model: make one with AutoTokenizer"
        in message()
    )
    build_bytelevel_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|gone|>"}')
    assert "eos_token '<|gone|>' is not in tokenizer.json" in message()
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "cannot be read as JSON" in message()
    Path(tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense", "vocab": {}}}')
    assert "not accepted by tokenizers" in message()


@pytest.mark.parametrize(
    ("template", "contents"),
    [
        ("{% for m in messages %}{{ m.content }}>{% endfor %}", ["<|im_end|"]),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_", "end|>x"]),
    ],
)
def test_contents_make_no_special_tokens_across_their_edges(tmp_path, template, contents):
    tokenizer = Tokenizer.from_folder(build_bytelevel_tokenizer(tmp_path), template)
    tokens = tokenizer.tokenize([chat_document(*contents)])[0]
    of_content = tokens.ids[tokens.byte_lengths > 0]
    assert not set(of_content.tolist()) & tokenizer.special_ids


@pytest.mark.parametrize(
    "content",
    ['{"a": 1}', '{"model": null}', '{"model": {"type": "BPE", "merges": [1], "vocab": {"a": "0"}}}', "[" * 100_000],
)
def test_files_that_are_no_tokenizer_are_refused_in_a_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_ids_past_those_of_the_file_are_refused(tmp_path):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    added = {"id": 0, "content": "<x>", "special": False, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [added], "model": model}))
    with pytest.raises(TokenizerError, match="added token's id is taken"):
        Tokenizer.from_folder(tmp_path).tokenize([text_document("a<x>b")])


def test_byte_ends_of_ids_beyond_any_vocabulary_are_refused(load):
    with pytest.raises(TokenizerError, match="expected token ids below"):
        load("bytelevel").byte_ends(np.array([2**32 + 1]), "b")
