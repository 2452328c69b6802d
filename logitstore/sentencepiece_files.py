"""SentencePiece models (tokenizer.model) as a tokenizer.json: the same ids for the same text.

A model is a protocol buffer of pieces with scores, and says how text is normalised first. What a tokenizer.json cannot
say is refused, but for three things that it says a little differently: text after a user-defined piece gets a space of
its own put before it; the ``tokenizers`` library applies rules that join characters (a kana and its voicing mark) only
to what is one grapheme of less than six bytes; and a Unigram takes the spelling of a control piece for that piece where
the vocabulary lacks one of its characters.

Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from logitstore.errors import TokenizerError
from logitstore.rank_files import added_token, bpe_model

_UNIGRAM, _BPE, _CHAR = 1, 2, 4
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_UNREACHABLE = -1000.0
"""Score of what stands in the vocabulary, but not for its own spelling: any other way to spell it is better."""


@dataclass(frozen=True)
class SentencePieceModel:
    """A parsed model."""

    pieces: tuple[tuple[str, float, int], ...]
    """(spelling, score, type) by id."""
    kind: int
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    special_tokens: dict[str, str]
    """Spelling by name: ``{"bos_token": "<s>", ...}``, of those that the model has."""


def parse_sentencepiece(data: bytes, where: str) -> SentencePieceModel:
    """Read a model.

    Raises:
        TokenizerError: it is not one, or asks for what is not supported.
    """
    try:
        proto = list(_fields(data))
        pieces = tuple(_piece(dict(_fields(value))) for number, value in proto if number == 1)
        trainer, normaliser = (dict(_fields(next((v for n, v in proto if n == wanted), b""))) for wanted in (2, 3))
        kind = int(trainer.get(3, _UNIGRAM))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise TokenizerError(
            f"{where}: expected a SentencePiece model, but its bytes are not one ({error}); fetch the file again"
        ) from error
    refused = {
        "no pieces": not pieces,
        f"model type {kind}": kind not in {_UNIGRAM, _BPE, _CHAR},
        "spaces as suffixes": bool(trainer.get(24)),
        "spaces that are not escaped": not normaliser.get(5, 1),
        "unused pieces": any(kind == _UNUSED for _, _, kind in pieces),
        "two pieces of one spelling": len({piece for piece, _, _ in pieces}) < len(pieces),
    }
    for what, is_so in refused.items():
        if is_so:
            raise TokenizerError(
                f"{where}: expected a SentencePiece model that a tokenizer.json can express, found {what}; "
                "save a tokenizer.json with transformers"
            )
    ids = {"unk_token": trainer.get(40, 0), "bos_token": trainer.get(41, 1), "eos_token": trainer.get(42, 2)}
    ids["pad_token"] = trainer.get(43, len(pieces))
    return SentencePieceModel(
        pieces=pieces,
        kind=kind,
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=bytes(normaliser.get(2, b"")),
        add_dummy_prefix=bool(normaliser.get(3, 1)),
        remove_extra_whitespaces=bool(normaliser.get(4, 1)),
        # Ids that are -1 are huge as they stand there.
        special_tokens={name: pieces[index][0] for name, index in ids.items() if index < len(pieces)},
    )


def convert_sentencepiece(model: SentencePieceModel) -> dict[str, Any]:
    """A tokenizer.json with the model's pieces by the same ids."""
    added = [
        added_token(index, piece, special=kind != _USER_DEFINED)
        for index, (piece, _, kind) in enumerate(model.pieces)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
    ]
    steps: list[dict[str, Any]] = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": list(_normalisers(model))},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _unigram(model) if model.kind == _UNIGRAM else _bpe(model),
    }


def _normalisers(model: SentencePieceModel) -> Iterator[dict[str, Any]]:
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": charsmap}
    if model.remove_extra_whitespaces:
        yield {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if model.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield _replace(" ", _SPACE)


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    lowest = min((score for _, score, kind in model.pieces if kind == _NORMAL), default=0.0)
    spelled = {_NORMAL, _USER_DEFINED}
    return {
        "type": "Unigram",
        "unk_id": _unknown(model.pieces),
        "vocab": [[piece, score if kind in spelled else lowest + _UNREACHABLE] for piece, score, kind in model.pieces],
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(model.pieces)}
    joined = {piece: score for piece, score, kind in model.pieces if kind in {_NORMAL, _USER_DEFINED}}
    return bpe_model(
        vocabulary,
        list(_merges(joined, vocabulary)) if model.kind == _BPE else [],
        unk_token=model.pieces[_unknown(model.pieces)][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> Iterator[list[str]]:
    """All ways to join two pieces to a third, those of the highest score first."""
    for piece in sorted(scores, key=lambda piece: (-scores[piece], ids[piece])):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in halves if pair[0] in scores and pair[1] in scores]
        yield from map(list, sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]])))


def _unknown(pieces: Sequence[tuple[str, float, int]]) -> int:
    return next((index for index, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN), 0)


def _piece(fields: Mapping[int, Any]) -> tuple[str, float, int]:
    [score] = struct.unpack("<f", fields.get(2, b"\0\0\0\0"))
    return bytes(fields[1]).decode(), score, int(fields.get(3, _NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protocol buffer: integers for varints, bytes for all else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in {1, 5}:
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(message)}")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
