"""The tokenizers of the alignment's benchmark: two that ship with mistral-common, and four kinds trained here.

Each comes with what the tokenizer itself says of its tokens, not what logitstore says: bytes, where tokens stand for
bytes, else its normaliser and the spelling of its pieces. Alignments are judged by these alone.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tokenizers
from alignment_corpora import CORPORA, LONG, load_corpus
from demo_tokenizers import train_bytelevel_tokenizer
from store_corpus import token_bytes
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from logitstore.tokenizer import Tokenizer

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_MISTRAL = {"tekken 131k": ("tekken_240911.json", "131k"), "SentencePiece 32k": ("tokenizer.model.v1", "32k")}
_UNKNOWN = frozenset({"<unk>", "[UNK]"})


@dataclass(frozen=True, eq=False)
class BenchTokenizer:
    """A tokenizer as logitstore has it, and what it says of itself.

    Attributes:
        tokens: the spelling of each token by id, as published aligners compare them.
        spelled: bytes of each token by id, where tokens stand for bytes; else None.
        pieces: of a tokenizer that normalises: text of each token by id, None for unknown text; else None.
        normalise: of such a one: what it makes of a text before it is cut.
    """

    name: str
    ours: Tokenizer
    tokens: list[str]
    spelled: list[bytes] | None
    pieces: list[str | None] | None = None
    normalise: Callable[[str], str] | None = None

    @property
    def is_lossless(self) -> bool:
        return self.spelled is not None


NAMES = (*_MISTRAL, "ByteLevel", "Llama-3-style", "Unigram, NFKC", "WordPiece, lower-cased")


def load_tokenizer(name: str, build: Path, vocab_size: int = 8192) -> BenchTokenizer:
    """One of ``NAMES``; the four are trained unless ``build`` has them.

    Args:
        name: of the tokenizer.
        build: folder for trained ones.
        vocab_size: of trained ones.
    """
    if name in _MISTRAL:
        return _mistral(name)
    folder = build / f"{''.join(filter(str.isalnum, name))}-{vocab_size}"
    if not (folder / "tokenizer.json").exists():
        _TRAINERS[name](folder, _training_texts(), vocab_size)
    ours, own = Tokenizer.from_folder(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spellings = [own.id_to_token(index) or "" for index in range(own.get_vocab_size())]
    if own.normalizer is None:
        alphabet, special = byte_alphabet(), own.get_added_tokens_decoder()
        spelled = [bytes(alphabet.get(character, 0) for character in spelling) for spelling in spellings]
        return BenchTokenizer(name, ours, spellings, [b"" if n in special else data for n, data in enumerate(spelled)])
    begin = "##" if isinstance(own.model, models.WordPiece) else ""
    pieces = [None if text in _UNKNOWN else text.removeprefix(begin).replace("▁", " ") for text in spellings]
    return BenchTokenizer(name, ours, spellings, None, pieces, own.normalizer.normalize_str)


def _mistral(name: str) -> BenchTokenizer:
    file, vocabulary = _MISTRAL[name]
    ours = Tokenizer.from_folder(str(importlib.resources.files("mistral_common") / "data" / file))
    spelled = [data or b"" for data in token_bytes(vocabulary)[0]]
    if vocabulary == "131k":
        characters = {byte: character for character, byte in byte_alphabet().items()}
        tokens = ["".join(characters.get(byte, "?") for byte in data) for data in spelled]
    else:
        tokens = [_sentencepiece_spelling(data) for data in spelled]
    return BenchTokenizer(name, ours, tokens, spelled)


def _sentencepiece_spelling(data: bytes) -> str:
    try:
        return data.decode().replace(" ", "▁")
    except UnicodeDecodeError:
        return f"<0x{data.hex().upper()}>"


@cache
def byte_alphabet() -> dict[str, int]:
    """Byte by the character that stands for it, as the tokenizers library itself spells UTF-8."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = {}
    for point in (*range(0x801), 0xFFFF, *range(0x1000, 0xD800, 0x1000), *range(0xE000, 0x110000, 0x8000)):
        (word, _), *_ = spell.pre_tokenize_str(chr(point))
        alphabet.update(zip(word, chr(point).encode(), strict=True))
    return alphabet


@cache
def _training_texts() -> tuple[str, ...]:
    """A third of every corpus."""
    return tuple(text for name in CORPORA if name != LONG for text in load_corpus(name)[::3])


def _train_llama_style(folder: Path, texts: tuple[str, ...], vocab_size: int) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    _train(tokenizer, trainer, folder, texts)


def _train_unigram(folder: Path, texts: tuple[str, ...], vocab_size: int) -> None:
    """As T5's and XLM-R's, but with plain NFKC: runs of spaces become one, and one is put before the text."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    _train(tokenizer, trainer, folder, texts)


def _train_wordpiece(folder: Path, texts: tuple[str, ...], vocab_size: int) -> None:
    """As BERT's: lower case, no accents, no control characters, words that it cannot spell are unknown."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["[UNK]"], limit_alphabet=2000, show_progress=False
    )
    _train(tokenizer, trainer, folder, texts)


def _train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer, folder: Path, texts: tuple[str, ...]) -> None:
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def _train_bytelevel(folder: Path, texts: tuple[str, ...], vocab_size: int) -> None:
    train_bytelevel_tokenizer(folder, list(texts), vocab_size)


_TRAINERS: dict[str, Callable[[Path, tuple[str, ...], int], None]] = {
    "ByteLevel": _train_bytelevel,
    "Llama-3-style": _train_llama_style,
    "Unigram, NFKC": _train_unigram,
    "WordPiece, lower-cased": _train_wordpiece,
}
