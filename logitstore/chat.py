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

from logitstore.byte_ends import Proof
from logitstore.documents import TRAINABLE_ROLES, Document
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
            whitespace, so that no byte is lost; its offset, so that they count nothing, where a content stands before
            one that came before it in the chat, or for the second time.
        proof: of where contents went: ``BYTES`` if each stands there unchanged and in order, ``CHARACTERS`` if only
            whitespace around them was stripped, ``NONE`` if they are out of order, or changed, or had to be searched.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    reaches: tuple[int, ...]
    proof: Proof

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
        begin_S, end_S = self.byte_spans()
        span = np.searchsorted(begin_S, ends, side="left") - 1  # the last span that begins before the token's end
        reach = np.asarray(self.reaches)[span]
        inside = np.asarray(self.offsets)[span] + ends - begin_S[span]
        covered = np.where(ends < end_S[span], np.minimum(inside, reach), reach)
        return np.diff(np.where(span < 0, 0, covered), prepend=0).astype(np.int32)

    def byte_spans(self) -> tuple[np.ndarray, np.ndarray]:
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
        if places is None:
            return _build(text, document, _places_by_search(text, document), Proof.NONE)
        return _build(text, document, places, _proof_of(text, contents, places))

    def _render(self, document: Document, contents: Sequence[str]) -> str:
        roles = [segment.role for segment in document.segments]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=False, **self.variables
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{document.source or 'a chat'}: the chat template refuses roles {', '.join(roles)}: {error}"
            ) from error


Place = tuple[int, int, int]
"""Message, and the begin and size of its content in the rendered text, in characters."""


def _placeholder(message: int) -> str:
    return f"\U000ff1ed{message}\U000ff1ee"


def _places_by_skeleton(text: str, skeleton: str, contents: Sequence[str]) -> list[Place] | None:
    """Fill the skeleton with the contents, as the template changes them; None if that does not give ``text``.

    Places are in the order of ``text``, which may not be that of the messages, and may have some of them twice.
    """
    literal, *rest = re.split("\U000ff1ed([0-9]+)\U000ff1ee", skeleton)
    found = [int(n) for n in rest[::2]]
    if set(found) != {n for n, content in enumerate(contents) if content} or not text.startswith(literal):
        return None
    places = []
    cursor = len(literal)
    for n, literal in zip(found, rest[1::2], strict=True):
        variant = next((one for one in _variants(contents[n]) if text.startswith(one + literal, cursor)), None)
        if variant is None:
            return None
        places.append((n, cursor, len(variant)))
        cursor += len(variant) + len(literal)
    return places if cursor == len(text) else None


def _variants(content: str) -> tuple[str, ...]:
    """What templates make of a content: strip it, or write it as JSON (Llama-3's tools)."""
    return content, content.strip(), content.lstrip(), content.rstrip(), _to_json(content)[1:-1]


def _proof_of(text: str, contents: Sequence[str], places: Sequence[Place]) -> Proof:
    messages = [n for n, _, _ in places]
    written = [text[begin : begin + size] for _, begin, size in places]
    if messages != sorted(set(messages)):
        return Proof.NONE
    if all(contents[n] == content for n, content in zip(messages, written, strict=True)):
        return Proof.BYTES
    stripped = all(contents[n].strip() == content.strip() for n, content in zip(messages, written, strict=True))
    return Proof.CHARACTERS if stripped else Proof.NONE


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


def _build(text: str, document: Document, places: Sequence[Place], proof: Proof) -> RenderedChat:
    contents = [segment.content for segment in document.segments]
    starts = np.concatenate([[0], np.cumsum([len(content.encode()) for content in contents])]).tolist()
    places = [place for place in places if place[2] > 0]
    counted = _in_order(places, document)
    # A stripped tail, and messages of whitespace alone, go to the span before them.
    ends = [starts[places[number][0]] for number in counted[1:]] + starts[-1:]
    reach_of = dict(zip(counted, ends, strict=False))
    offsets, reaches = [], []
    reach = 0
    for number, (n, begin, size) in enumerate(places):
        offset = reach
        if number in reach_of:
            stripped = contents[n][: max(0, contents[n].find(text[begin : begin + size]))]
            offset, reach = starts[n] + len(stripped.encode()), reach_of[number]
        offsets.append(offset)
        reaches.append(reach)
    spans = tuple((begin, begin + size) for _, begin, size in places)
    return RenderedChat(text, spans, tuple(offsets), tuple(reaches), proof)


def _in_order(places: Sequence[Place], document: Document) -> list[int]:
    """The places that count: messages in their order, each once, with as many characters of answers as can be.

    The heaviest increasing subsequence, in time of the square of the places where a template has reordered them.
    """
    messages = [n for n, _, _ in places]
    if messages == sorted(set(messages)):
        return list(range(len(places)))
    best: list[tuple[tuple[int, int], list[int]]] = []
    for number, (n, _, size) in enumerate(places):
        answers = size if document.segments[n].role in TRAINABLE_ROLES else 0
        before = max((found for found in best if messages[found[1][-1]] < n), default=((0, 0), []))
        best.append(((before[0][0] + answers, before[0][1] + size), [*before[1], number]))
    return max(best)[1]


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
