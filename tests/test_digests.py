"""Digests: one name for one value, whatever its spelling or its layout in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitstore.digests import canonical_json, decimal, digest_arrays, digest_bytes, digest_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=12,
)
VALUES = np.arange(24, dtype=np.int32).reshape(4, 6)


def test_digest_bytes_is_blake3():
    # The official test vector of no input.
    assert digest_bytes(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_digest_bytes_is_the_same_for_one_thread_and_many():
    large = bytes(3 << 20)
    assert digest_bytes(large) == digest_bytes(bytearray(large)) == digest_bytes(memoryview(large))


@given(JSON)
def test_canonical_json_reads_back_and_is_canonical(value):
    encoded = canonical_json(value)
    assert json.loads(encoded) == value
    assert canonical_json(json.loads(encoded)) == encoded


def test_canonical_json_sorts_keys_without_spaces_in_utf8():
    assert canonical_json({"b": [1, None], "a": {"é": True}}) == '{"a":{"é":true},"b":[1,null]}'.encode()
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json([1, 2]) == digest_json((1, 2)) != digest_json([2, 1])
    assert digest_json(True) != digest_json(1)


@pytest.mark.parametrize("value", [1.0, {"a": [0.5]}, [(float("nan"),)], np.float64(2), {"a": {"b": -0.0}}])
def test_canonical_json_with_a_float_is_refused(value):
    with pytest.raises(TypeError, match="decimal string"):
        canonical_json(value)


@pytest.mark.parametrize("value", [{1: "a"}, {"a": b"bytes"}, {"a": {1, 2}}, np.float32(1)])
def test_canonical_json_with_what_json_has_no_form_for_is_refused(value):
    with pytest.raises(TypeError):
        canonical_json(value)


@given(st.floats(allow_nan=False))
def test_decimal_reads_back_as_the_same_float(value):
    assert float(decimal(value)) == value
    canonical_json({"value": decimal(value)})


def test_digest_arrays_is_pinned():
    """Every store ever written rests on it: a change here is a change of format."""
    arrays = {"b": np.array([[1, 2], [3, 4]], np.int32), "a": np.array([True, False]), "c": np.float32(0.5)}
    assert digest_arrays(arrays) == "d57547d032f701356c13fb2970c876f504474722019ae7397f74c8a061837f9c"


@pytest.mark.parametrize(
    "same",
    [
        VALUES.astype(">i4"),
        np.asfortranarray(VALUES),
        np.repeat(VALUES, 2, axis=1)[:, ::2],
        VALUES[::-1][::-1],
        np.frombuffer(VALUES.tobytes(), np.int32).reshape(4, 6),
    ],
    ids=["big-endian", "fortran", "strided", "reversed", "read-only"],
)
def test_digest_arrays_ignores_layout(same):
    assert digest_arrays({"x": same}) == digest_arrays({"x": VALUES})


def test_digest_arrays_ignores_the_order_of_names():
    assert digest_arrays({"x": VALUES, "y": VALUES}) == digest_arrays({"y": VALUES, "x": VALUES})


def test_digest_arrays_tells_names_dtypes_shapes_and_values_apart():
    changed = VALUES.copy()
    changed[3, 5] += 1
    different = [
        {"x": VALUES},
        {"y": VALUES},
        {"x": VALUES.astype(np.uint32)},
        {"x": VALUES.reshape(6, 4)},
        {"x": VALUES.reshape(-1)},
        {"x": changed},
        {"x": VALUES, "y": np.empty(0, np.int32)},
        {"x": VALUES[:2], "y": VALUES[2:]},
        {"x": np.int32(1)},
        {"x": np.array([1], np.int32)},
        {"x": np.empty((0, 2), np.int32)},
        {"x": np.empty((0, 3), np.int32)},
        {},
    ]
    assert len({digest_arrays(arrays) for arrays in different}) == len(different)
