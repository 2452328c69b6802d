"""Tokenizers as assets: what of a tokenizer.json bears on behaviour, in one spelling: its digest is its identity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from logitstore.digests import canonical_json

# Padding and truncation belong to a run, and whoever last called the tokenizer leaves them in its file.
_RUN_STATE = ("padding", "truncation")

# canonical_json refuses floats. A float is written {"$float": "0.1"}: the shortest decimal that reads back as the same
# float64. No value of a tokenizer.json has that form: a vocabulary that knows the token "$float" gives it an integer.
_FLOAT = "$float"


def encode_tokenizer(tokenizer_json: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a parsed tokenizer.json, without padding and truncation.

    Files that differ in these, in white space, in the order of keys, or in how they spell merges give the same bytes.
    """
    kept = {name: value for name, value in tokenizer_json.items() if name not in _RUN_STATE}
    model = dict(kept["model"])
    merges = model.pop("merges", None)
    kept = _encode_floats({**kept, "model": model})
    if merges is not None:  # hundreds of thousands, and never floats
        kept["model"]["merges"] = [_split_merge(merge) for merge in merges]
    return canonical_json(kept)


def decode_tokenizer(asset: bytes) -> dict[str, Any]:
    """The tokenizer.json that ``encode_tokenizer`` was given, but for what it leaves out."""
    return json.loads(asset, object_hook=_decode_float)


def _split_merge(merge: str | list[str]) -> list[str]:
    # Older files write a merge as "a b", newer ones as ["a", "b"], which allows for spaces in tokens.
    return merge.split(" ", 1) if isinstance(merge, str) else list(merge)


def _encode_floats(value: Any) -> Any:
    if isinstance(value, float):
        return {_FLOAT: repr(value)}
    if isinstance(value, dict):
        return {key: _encode_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode_floats(item) for item in value]
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    if value.keys() == {_FLOAT} and isinstance(value[_FLOAT], str):
        return float(value[_FLOAT])
    return value
