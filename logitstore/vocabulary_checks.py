"""Whether two vocabularies can be what they seem: maps between misread ones are nearly empty, and nobody notices."""

from __future__ import annotations

from logitstore.errors import VocabularyError
from logitstore.token_order import TokenTable

MIN_COMMON = 0.02
"""Least share of the smaller vocabulary's spellings that the other one has, too. Unrelated ones of 32k and 131k tokens
have 40 %; the bytes and letters alone of a vocabulary of 32k are 1 %."""
_MIN_WITH_BYTES = 0.4
_MAX_UNDECODED = 0.02
_UNDECODED = {
    "Ġ".encode(): "ByteLevel BPE, where it stands for a space",
    "▁".encode(): "SentencePiece, where it stands for a space",
}


def check_readable(token_bytes: TokenTable, num_special: int, name: str) -> None:
    """Refuse a table of bytes that was not read as its kind of tokenizer writes them.

    Args:
        token_bytes: [V].
        num_special: how many of the tokens are special, and so have no bytes.
        name: of the tokenizer, for the message.

    Raises:
        VocabularyError: more than 2 % of the tokens begin with the sign that some kinds of tokenizers put for a space,
            or fewer than 40 % of those that are not special have any bytes.
    """
    pieces = [piece for piece in token_bytes if piece]
    num_ordinary = len(token_bytes) - num_special
    if len(pieces) < _MIN_WITH_BYTES * num_ordinary or not pieces:
        raise VocabularyError(
            f"{name}: {len(pieces):,} of its {num_ordinary:,} ordinary tokens have bytes, expected at least "
            f"{_MIN_WITH_BYTES:.0%}: its table is probably read as another kind of tokenizer than it is of; check the "
            "decoder in its tokenizer.json"
        )
    for sign, kind in _UNDECODED.items():
        num_undecoded = sum(piece.startswith(sign) for piece in pieces)
        if num_undecoded > _MAX_UNDECODED * len(pieces):
            raise VocabularyError(
                f"{name}: {num_undecoded:,} of its {len(pieces):,} tokens begin with {sign.decode()!r}: its table is "
                f"probably one of {kind}, but was read as another kind; check the decoder in its tokenizer.json"
            )


def check_common(student_bytes: TokenTable, teacher_bytes: TokenTable, names: tuple[str, str]) -> None:
    """Refuse two vocabularies that have next to nothing in common.

    Args:
        student_bytes: [V_student].
        teacher_bytes: [V_teacher].
        names: of both, for the message.

    Raises:
        VocabularyError: they share less than ``MIN_COMMON`` of the smaller one.
    """
    student, teacher = ({piece for piece in side if piece} for side in (student_bytes, teacher_bytes))
    num_common = len(student & teacher)
    if num_common < MIN_COMMON * min(len(student), len(teacher)) or num_common == 0:
        raise VocabularyError(
            f"{names[0]} ({len(student):,} tokens) and {names[1]} ({len(teacher):,} tokens) have {num_common:,} "
            f"tokens of the same bytes, expected at least {MIN_COMMON:.0%} of the smaller: the bytes of one are "
            "probably misread; check the decoders in their tokenizer.json"
        )
