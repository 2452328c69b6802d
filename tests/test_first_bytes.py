"""The first byte of every token, as two vocabularies can be compared by it."""

from __future__ import annotations

from logitstore.first_bytes import first_bytes


def begins(*words: str) -> list[bytes | None]:
    return [word.encode() for word in words]


def test_first_bytes_are_those_of_the_bytes() -> None:
    some, other = [*begins(" The", "A", "é"), None, b"", b"\x80"], begins(" a", "Bc")
    assert [each.tolist() for each in first_bytes(some, other)] == [[32, 65, 0xC3, -1, -1, 0x80], [32, 66]]


def test_first_bytes_meet_where_a_side_drops_spaces_or_case() -> None:
    plain = [*begins(" The", "the", "É", " ", "\n", "ﬁn", " "), b"\xc3"]
    for normalised in (begins("the", "fin", "X"), begins(" the", "fin")):
        folded, _ = first_bytes(plain, normalised)
        assert folded.tolist() == [ord("t"), ord("t"), ord("e"), 32, 10, ord("f"), 32, 0xC3]
