"""Records: JSON that proves itself."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitstore.errors import DamageError
from logitstore.records import open_record, seal_record

BODY = {"recipe": {"kind": "text", "naïve": ["a b", 1, True, None]}, "stats": {"num_rows": 10}, "empty": {}, "n": -3}


def test_record_reads_back():
    assert open_record(seal_record(BODY), "here") == BODY
    assert open_record(seal_record({}), "here") == {}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers() | st.booleans() | st.none()))
def test_any_record_reads_back(body):
    body.pop("digest", None)
    assert open_record(seal_record(body), "here") == body


def test_record_is_readable_and_ends_with_a_line_end():
    lines = seal_record(BODY).decode().splitlines(keepends=True)
    assert len(lines) > 8
    assert lines[-1] == "}\n"
    assert "naïve" in "".join(lines)


def test_any_changed_byte_is_seen_or_means_nothing():
    """All eight single-bit flips and a few other values of every byte, and every byte dropped or doubled."""
    data = seal_record(BODY)
    num_refused = 0
    for position, byte in enumerate(data):
        changed = [byte ^ 1 << bit for bit in range(8)] + [0, 0xFF, ord(" "), ord('"'), ord("0")]
        spellings = [bytes([value]) for value in changed if value != byte] + [b"", bytes([byte]) * 2]
        for spelling in spellings:
            try:
                found = open_record(data[:position] + spelling + data[position + 1 :], "here")
            except DamageError:
                num_refused += 1
            else:
                assert found == BODY
                assert (bytes([byte]) + spelling).isspace()
    assert num_refused > 10 * len(data)


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_any_bytes_at_all_are_refused(data):
    with pytest.raises(DamageError, match="here"):
        open_record(data, "here")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"7", b'"text"', b"{}", b'{"a": 1}', b'{"digest": 5}', b'{"digest": null, "a": 1}',
        b'{"digest": [], "a": 0.5}', b"[" * 100_000, b'{"a":' * 100_000, b'{"digest": "x", "a": NaN}',
        b'{"digest": "x", "a": ' + b"9" * 5000 + b"}", b'{"digest": "x", "a": "\\ud800"}', b"\xff\xfe{\x00}\x00",
    ],
    ids=lambda data: repr(data[:24]),
)  # fmt: skip
def test_what_is_no_record_is_refused(data):
    with pytest.raises(DamageError, match=r"here: .*verify") as caught:
        open_record(data, "here")
    assert len(str(caught.value)) < 300


def test_truncated_record_is_refused():
    data = seal_record(BODY)
    for end in range(len(data) - 1):
        with pytest.raises(DamageError):
            open_record(data[:end], "here")


def test_reordered_and_respaced_record_is_the_same():
    record = json.loads(seal_record(BODY))
    respaced = json.dumps(dict(reversed(record.items())), separators=(",", " :  ")).encode()
    assert open_record(respaced, "here") == BODY


def test_record_with_a_float_is_refused_when_written():
    with pytest.raises(TypeError, match="decimal string"):
        seal_record({"seconds": 1.5})
