"""Chats as text: a tokenizer's Jinja template rendered as transformers does, and where each message's content went."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from logitstore.documents import Document
from logitstore.errors import TokenizerError

RENDERING_DATE = "2024-01-01"
"""The day that templates which ask for one are told: a rendering must not depend on when it was made."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as its template writes it, and the contents of its messages within.

    Attributes:
        text: the whole rendered string.
        spans: (begin, end) in characters of ``text``, of each content that left something there, in order.
        offsets: canonical byte of the document at which each span begins.
        reaches: canonical byte up to which the tokens of a span count: beyond its end where a template has stripped
            whitespace, so that no byte is lost.
        verbatim: every content stands in ``text`` unchanged, at a place known for certain.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    reaches: tuple[int, ...]
    verbatim: bool

    def runs(self) -> Iterator[tuple[str, bool]]:
        """The text cut at the spans: (run, whether it is content)."""
        cursor = 0
        for begin, end in self.spans:
            yield self.text[cursor:begin], False
            yield self.text[begin:end], True
            cursor = end
        yield self.text[cursor:], False

    def content_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Canonical bytes int32 [T] that each token newly covers, from the bytes of ``text`` [T] that it covers."""
        if not self.spans:
            return np.zeros(len(lengths), dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        begin_S, end_S = self._byte_spans()
        span = np.searchsorted(begin_S, ends, side="left") - 1  # the last span that begins before the token's end
        inside = np.asarray(self.offsets)[span] + ends - begin_S[span]
        covered = np.where(ends < end_S[span], inside, np.asarray(self.reaches)[span])
        return np.diff(np.where(span < 0, 0, covered), prepend=0).astype(np.int32)

    def _byte_spans(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(run.encode()) for run, _ in self.runs()]
        edges = np.cumsum(sizes)
        return edges[:-1:2], edges[1::2]


class ChatTemplate:
    """A compiled template with the special tokens it may ask for."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: the Jinja template.
            special_tokens: spelling by name: ``{"bos_token": "<s>", ...}``. Only those the template mentions are kept.

        Raises:
            TokenizerError: the template is not valid Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"chat template: not valid Jinja: {error}; give another with --chat-template"
            ) from error
        self.source = source
        self.variables = {name: token for name, token in sorted(special_tokens.items()) if name in source}

    def render(self, document: Document) -> RenderedChat:
        """Render a chat and find its contents.

        Raises:
            TokenizerError: the template refuses the chat, or leaves out the content of a message.
        """
        contents = [segment.content for segment in document.segments]
        text = self._render(document, contents)
        # A second rendering, of placeholders, shows where the contents go even if they are as short as "s".
        skeleton = self._render(document, [_placeholder(n) if content else "" for n, content in enumerate(contents)])
        places = _places_by_skeleton(text, skeleton, contents)
        verbatim = places is not None
        if places is None:
            places = _places_by_search(text, document)
        verbatim = verbatim and all(text[begin : begin + size] == contents[n] for n, begin, size in places)
        return _build(text, contents, places, verbatim)

    def _render(self, document: Document, contents: Sequence[str]) -> str:
        roles = [segment.role for segment in document.segments]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=False, **self.variables
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{document.source or 'a chat'}: the chat template refuses roles {', '.join(roles)}: {error}"
            ) from error


Place = tuple[int, int, int]
"""Message, and the begin and size of its content in the rendered text, in characters."""


def _placeholder(message: int) -> str:
    return f"\U000ff1ed{message}\U000ff1ee"


def _places_by_skeleton(text: str, skeleton: str, contents: Sequence[str]) -> list[Place] | None:
    """Fill the skeleton with the contents, stripped where the template strips; None if that does not give ``text``."""
    expected = [n for n, content in enumerate(contents) if content]
    literal, *rest = re.split("\U000ff1ed([0-9]+)\U000ff1ee", skeleton)
    if [int(n) for n in rest[::2]] != expected or not text.startswith(literal):
        return None
    places = []
    cursor = len(literal)
    for n, literal in zip(expected, rest[1::2], strict=True):
        content = contents[n]
        for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
            if text.startswith(variant + literal, cursor):
                break
        else:
            return None
        places.append((n, cursor, len(variant)))
        cursor += len(variant) + len(literal)
    return places if cursor == len(text) else None


def _places_by_search(text: str, document: Document) -> list[Place]:
    """Find each content after the one before: for templates that look into contents, which placeholders mislead."""
    places = []
    cursor = 0
    for n, segment in enumerate(document.segments):
        for variant in (segment.content, segment.content.strip()):
            begin = text.find(variant, cursor)
            if begin >= 0:
                break
        else:
            raise TokenizerError(
                f"{document.source or 'a chat'}: the chat template drops or changes the content of message {n + 1} "
                f"({segment.role}: {segment.content[:40]!r}): give one that keeps it with --chat-template FILE"
            )
        places.append((n, begin, len(variant)))
        cursor = begin + len(variant)
    return places


def _build(text: str, contents: Sequence[str], places: Sequence[Place], verbatim: bool) -> RenderedChat:
    sizes = [len(content.encode()) for content in contents]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()  # canonical byte at which each message starts
    kept = [place for place in places if place[2] > 0]
    offsets = []
    for n, begin, size in kept:
        stripped = contents[n][: contents[n].index(text[begin : begin + size])]
        offsets.append(starts[n] + len(stripped.encode()))
    # A stripped tail, and messages of whitespace alone, go to the span before them.
    reaches = [starts[n] for n, _, _ in kept[1:]] + [starts[-1]] if kept else []
    spans = tuple((begin, begin + size) for _, begin, size in kept)
    return RenderedChat(text, spans, tuple(offsets), tuple(reaches), verbatim)


class _GenerationTag(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what an assistant writes; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """The same dialect as in transformers: options, extensions, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = date.fromisoformat(RENDERING_DATE).strftime
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
