"""The bytes of every token, read from a tokenizer.json.

The table is a claim, not a fact: whoever uses it proves on each text that the tokens' bytes, put together, are the
text's (``logitstore.byte_lengths``). So a kind of tokenizer that is not known here costs exactness, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

Decoder = Callable[[str], bytes | None]

_WORD_MARKS = ("continuing_subword_prefix", "end_of_word_suffix")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer_json: Mapping[str, Any]) -> list[bytes | None]:
    """UTF-8 (or partial UTF-8) that each token stands for, by id.

    Knows ByteLevel BPE, BPE or Unigram with metaspace ("▁" for a space) and byte fallback (``<0x0A>``), the marks of
    WordPiece ("##" before what continues a word) and those of older BPE ("</w>" after a word): the space between two
    words is no token's own. Tokens of other kinds stand for their own spelling, which fails to prove itself wherever
    that is not so.

    Args:
        tokenizer_json: the parsed ``tokenizer.json``.

    Returns:
        A list of length (highest id + 1); None for special tokens, for the unknown token, for ids that no token has,
        and for tokens that have no bytes of their own.
    """
    decode = _decoder(tokenizer_json)
    ids = dict(_vocabulary(tokenizer_json["model"]))
    added = tokenizer_json.get("added_tokens") or []
    size = 1 + max([*ids.values(), *(token["id"] for token in added)], default=-1)
    table: list[bytes | None] = [None] * size
    for token, index in ids.items():
        table[index] = decode(token)
    unknown = unknown_id(tokenizer_json)
    if unknown is not None:
        table[unknown] = None
    # Added tokens are matched in the text before the model runs, so they are spelled as they are, but for those that
    # are matched in the text as normalised.
    spell = _spelling_after_normaliser(tokenizer_json)
    for token in added:
        content = spell(token["content"]) if token.get("normalized") else token["content"]
        table[token["id"]] = None if token.get("special") else content.encode()
    return table


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the model cuts it."""

    content: str
    special: bool = False
    lstrip: bool = False
    """It takes the white space before it."""
    rstrip: bool = False
    """It takes the white space after it."""


def added_tokens(tokenizer_json: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens, special ones among them, by id."""
    flags = ("special", "lstrip", "rstrip")
    return {
        token["id"]: AddedToken(token["content"], **{name: bool(token.get(name)) for name in flags})
        for token in tokenizer_json.get("added_tokens") or []
    }


def unknown_id(tokenizer_json: Mapping[str, Any]) -> int | None:
    """The token that stands for what the vocabulary cannot spell, if there is one."""
    model = tokenizer_json["model"]
    if model.get("unk_id") is not None:  # Unigram
        return int(model["unk_id"])
    token = model.get("unk_token")
    return None if token is None else dict(_vocabulary(model)).get(token)


def special_tokens(tokenizer_json: Mapping[str, Any]) -> dict[int, str]:
    """Spelling of each special added token, by id."""
    added = tokenizer_json.get("added_tokens") or []
    return {token["id"]: token["content"] for token in added if token.get("special")}


def _vocabulary(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.items()
    else:  # Unigram: a list of (token, score)
        yield from ((token, index) for index, (token, _) in enumerate(vocabulary))


def _decoder(tokenizer_json: Mapping[str, Any]) -> Decoder:
    # A tokenizer without a decoder says how it writes spaces and bytes in its pre-tokenizer only.
    steps = list(_flatten(tokenizer_json.get("decoder"))) or list(_flatten(tokenizer_json.get("pre_tokenizer")))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _decode_bytelevel
    has_bytes = tokenizer_json["model"].get("byte_fallback") or any(step["type"] == "ByteFallback" for step in steps)
    replacements = list(_replacements(steps))
    prefix, suffix = (tokenizer_json["model"].get(name) or "" for name in _WORD_MARKS)

    def decode(token: str) -> bytes | None:
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        token = _without_marks(token, prefix, suffix)
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return decode


def _without_marks(token: str, prefix: str, suffix: str) -> str:
    """A token that is nothing but its mark stands for itself."""
    bare = token.removeprefix(prefix).removesuffix(suffix)
    return bare or token


def _spelling_after_normaliser(tokenizer_json: Mapping[str, Any]) -> Callable[[str], str]:
    """What text gives a spelling once it is normalised: a normaliser that writes "▁" for spaces is undone."""
    steps = _flatten(tokenizer_json.get("normalizer"))
    undo = [(new, old) for old, new in _replacements(list(steps)) if old == " " and new]

    def spell(content: str) -> str:
        for new, old in undo:
            content = content.replace(new, old)
        return content

    return spell


def _flatten(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, pre-tokenizer or normaliser, sequences opened."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for name in ("decoders", "pretokenizers", "normalizers"):
            for step in component.get(name) or ():
                yield from _flatten(step)
    else:
        yield component


def _replacements(steps: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        if step["type"] == "Metaspace":
            yield step["replacement"], " "
        elif step["type"] == "Replace" and "String" in step["pattern"] and "content" in step:
            yield step["pattern"]["String"], step["content"]


def spell_bytes(token: bytes) -> str:
    """How ByteLevel vocabularies spell bytes."""
    return "".join(map(_characters_by_byte().__getitem__, token))


def _decode_bytelevel(token: str) -> bytes | None:
    try:
        return bytes(map(_bytes_by_character().__getitem__, token))
    except KeyError:
        return None


@cache
def _bytes_by_character() -> dict[str, int]:
    """Inverse of GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


@cache
def _characters_by_byte() -> dict[int, str]:
    return {byte: character for character, byte in _bytes_by_character().items()}
