"""Documents: what a corpus is made of, and the digests that name them.

A document is a sequence of segments (role, content). Its canonical bytes are the UTF-8 of the contents, one after the
other, with nothing in between: every tokenizer cuts those same bytes, whatever its template puts around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from logitstore.digests import digest_bytes

# The position of a role is stored, so the order is part of the format: append only.
ROLES = ("text", "prompt", "completion", "system", "user", "assistant", "tool", "developer")
TRAINABLE_ROLES = frozenset({"text", "completion", "assistant"})
"""Roles that keep their loss when a mask of completions or assistant turns is asked for."""

CHAT_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})


@dataclass(frozen=True)
class Segment:
    """A run of text with one role, one of ``ROLES``."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """One text, prompt + completion, or chat."""

    segments: tuple[Segment, ...]
    source: str = ""
    """Where it was read from; never part of its identity."""

    @property
    def is_chat(self) -> bool:
        return self.segments[0].role in CHAT_ROLES

    @property
    def text(self) -> str:
        """The contents of all segments, concatenated."""
        return "".join(segment.content for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        return sum(len(segment.content.encode()) for segment in self.segments)

    def digest(self) -> bytes:
        """32 bytes that name the document: BLAKE3 over its roles and contents."""
        return _digest_segments(self.segments)

    def prompt_digest(self) -> bytes:
        """Digest of what comes before the first answer, else of the document: documents that share it share a split."""
        prompt = []
        for segment in self.segments:
            if segment.role in {"completion", "assistant"}:
                break
            prompt.append(segment)
        return _digest_segments(tuple(prompt)) if prompt else self.digest()


def _digest_segments(segments: tuple[Segment, ...]) -> bytes:
    # Lengths delimit the contents, so no two lists of segments share an encoding.
    parts = [b"logitstore.document.1"]
    for segment in segments:
        content = segment.content.encode()
        parts.append(f"|{segment.role}:{len(content)}:".encode())
        parts.append(content)
    return bytes.fromhex(digest_bytes(b"".join(parts)))
