"""The bytes of every token, read from a tokenizer.json.

The table is a claim, not a fact: whoever uses it proves on each text that the tokens' bytes, put together, are the
text's (``logitstore.byte_lengths``). So a kind of tokenizer that is not known here costs exactness, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

Decoder = Callable[[str], bytes | None]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer_json: Mapping[str, Any]) -> list[bytes | None]:
    """UTF-8 (or partial UTF-8) that each token stands for, by id.

    Knows ByteLevel BPE, and BPE or Unigram with metaspace ("▁" for a space) and byte fallback (``<0x0A>``). Tokens of
    other kinds (WordPiece, ...) stand for their own spelling, which fails to prove itself wherever that is not so.

    Args:
        tokenizer_json: the parsed ``tokenizer.json``.

    Returns:
        A list of length (highest id + 1); None for special tokens, for ids that no token has, and for tokens that have
        no bytes of their own.
    """
    decode = _decoder(tokenizer_json)
    ids = dict(_vocabulary(tokenizer_json["model"]))
    added = tokenizer_json.get("added_tokens") or []
    size = 1 + max([*ids.values(), *(token["id"] for token in added)], default=-1)
    table: list[bytes | None] = [None] * size
    for token, index in ids.items():
        table[index] = decode(token)
    for token in added:
        # Added tokens are matched in the text before the model runs, so they are spelled as they are.
        table[token["id"]] = None if token.get("special") else token["content"].encode()
    return table


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

    def decode(token: str) -> bytes | None:
        byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return decode


def _flatten(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder or pre-tokenizer, sequences opened."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for step in component.get("decoders") or component.get("pretokenizers") or ():
            yield from _flatten(step)
    else:
        yield component


def _replacements(steps: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        if step["type"] == "Metaspace":
            yield step["replacement"], " "
        elif step["type"] == "Replace" and "String" in step["pattern"] and "content" in step:
            yield step["pattern"]["String"], step["content"]


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
