"""What a row of a corpus means: its fields by name, and the document they make."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from logitstore.documents import CHAT_ROLES, Document, Segment
from logitstore.errors import ConfigError


class UnreadableRow(Exception):  # noqa: N818 (a finding about data, not a failure of ours)
    """A row that makes no document; its message says why. Readers add where."""


@dataclass(frozen=True)
class FieldMap:
    """The names that a corpus gives to the fields of its rows."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    role: str = "role"
    content: str = "content"

    @classmethod
    def parse(cls, mapping: str) -> FieldMap:
        """Read ``"text=body,prompt=question"``: our name, ``=``, the corpus's name.

        Raises:
            ConfigError: an unknown name on the left (the nearest known one is named), or a part without ``=``.
        """
        known = [field.name for field in fields(cls)]
        changes = {}
        for part in filter(None, (part.strip() for part in mapping.split(","))):
            name, equals, column = (piece.strip() for piece in part.partition("="))
            if not equals or not column:
                raise ConfigError(f"field map {mapping!r}: expected NAME=FIELD, found {part!r}, write e.g. text=body")
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                names = ", ".join(known)
                raise ConfigError(
                    f"field map {mapping!r}: unknown name {name!r}, did you mean {nearest!r}? (known: {names})"
                )
            changes[name] = column
        return replace(cls(), **changes)

    @property
    def columns(self) -> tuple[str, ...]:
        """Top-level fields that a row is made of."""
        return (self.messages, self.prompt, self.completion, self.text)


def parse_row(row: object, names: FieldMap, source: str) -> Document | None:
    """The document of one row, or None if it has no content at all.

    ``messages`` wins over ``prompt`` + ``completion``, and these over ``text``, by which are there and not null.

    Raises:
        UnreadableRow: the row is one already, is not an object, lacks those fields, or holds no text in them.
    """
    if isinstance(row, UnreadableRow):
        raise row
    if not isinstance(row, Mapping):
        raise UnreadableRow(f"expected an object with fields, found {_kind(row)}")
    if row.get(names.messages) is not None:
        segments = _parse_messages(row[names.messages], names)
    elif row.get(names.prompt) is not None and row.get(names.completion) is not None:
        segments = tuple(
            Segment(role, _parse_content(row[name], name))
            for role, name in (("prompt", names.prompt), ("completion", names.completion))
        )
    elif row.get(names.text) is not None:
        segments = (Segment("text", _parse_content(row[names.text], names.text)),)
    else:
        raise UnreadableRow(_missing_fields(row, names))
    if not any(segment.content for segment in segments):
        return None
    return Document(segments, source)


def missing_columns(columns: list[str], names: FieldMap) -> str | None:
    """Why no row of a table with these columns could make a document; None if one could."""
    there = set(columns)
    if names.messages in there or names.text in there or {names.prompt, names.completion} <= there:
        return None
    return _missing_fields(dict.fromkeys(columns, ""), names)


def _parse_messages(messages: Any, names: FieldMap) -> tuple[Segment, ...]:
    if not isinstance(messages, list):
        raise UnreadableRow(f"expected a list in {names.messages!r}, found {_kind(messages)}")
    segments = []
    for index, message in enumerate(messages):
        where = f"{names.messages}[{index}]"
        if not isinstance(message, Mapping):
            raise UnreadableRow(f"expected an object in {where}, found {_kind(message)}")
        role = message.get(names.role)
        if not isinstance(role, str) or role not in CHAT_ROLES:
            known = ", ".join(sorted(CHAT_ROLES))
            raise UnreadableRow(f"unknown role {role!r} in {where}.{names.role} (known: {known})")
        segments.append(Segment(role, _parse_content(message.get(names.content), f"{where}.{names.content}")))
    return tuple(segments)


def _parse_content(content: Any, where: str) -> str:
    if not isinstance(content, str):
        raise UnreadableRow(f"expected a string in {where!r}, found {_kind(content)}")
    try:
        # JSON can spell lone surrogates, which have no UTF-8 and so no canonical bytes.
        content.encode()
    except UnicodeEncodeError as error:
        raise UnreadableRow(f"lone surrogate at character {error.start} of {where!r}: not valid Unicode") from None
    return content


def _missing_fields(row: Mapping[str, Any], names: FieldMap) -> str:
    wanted = f"{names.text!r}, {names.prompt!r} + {names.completion!r} or {names.messages!r}"
    found = ", ".join(sorted(str(name) for name, value in row.items() if value is not None)) or "none"
    return f"expected fields {wanted}, found {found}: map the names, e.g. text={next(iter(row), 'body')}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return names.get(type(value), type(value).__name__)
