"""What is in a store, in numbers and, for one document, in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from logitstore.alignment import AlignmentStatistics
from logitstore.alignment_parts import find_alignment
from logitstore.columns import inputs_of
from logitstore.errors import StoreError
from logitstore.manifest import Column, Manifest
from logitstore.selections import selection_name
from logitstore.signals import PROJECTED, read_sparse
from logitstore.store import DatasetVersion, Store
from logitstore.token_parts import read_tokens
from logitstore.tokenizer import Tokenizer
from logitstore.vocabulary_maps import read_maps

_GROUPS = {"text": "text", "tokens": "tokens", "signal": "signals", "alignment": "alignments"}


def describe_store(store: Store) -> dict[str, Any]:
    """JSON-able: the store's URL and its datasets with their newest version."""
    datasets = {name: describe_dataset(store, store.dataset(name)) for name in store.datasets()}
    return {"store": store.storage.url, "datasets": datasets}


def describe_dataset(store: Store, version: DatasetVersion) -> dict[str, Any]:
    """JSON-able: counts, sizes by kind and array, teachers, tokenizers, alignments with their coverage."""
    manifest = version.manifest
    blocks = manifest.plan.blocks
    num_tokens = _num_tokens(manifest)
    num_bytes = {group: _stored_bytes(manifest, kind) for kind, group in _GROUPS.items()}
    return {
        "dataset": version.name,
        "version": version.number,
        "manifest_digest": manifest.identity,
        "num_blocks": len(blocks),
        "num_documents": int(blocks.num_documents.sum()),
        "num_held_out_documents": int(blocks.num_documents[blocks.held_out].sum()),
        "num_duplicates": blocks.num_duplicates,
        "num_text_bytes": int(blocks.num_bytes.sum()),
        "num_tokens": num_tokens,
        "total_bytes": sum(num_bytes.values()),
        "bytes_per_token": {
            group: size / num_tokens if num_tokens else None
            for group, size in {**num_bytes, "total": sum(num_bytes.values())}.items()
        },
        "teachers": _teachers(manifest),
        "tokenizers": {column.label: column.template["tokenizer"] for column in manifest.find("tokens")},
        "alignments": [describe_alignment(manifest, column) for column in _alignments(manifest)],
        "columns": [_column(store, manifest, column) for column in manifest.columns],
    }


@dataclass(frozen=True)
class TokenView:
    """A token as its teacher saw it coming.

    Attributes:
        text: printable.
        logprob: of the token, nats; None where the teacher said nothing.
        candidates: (printable token, log-prob or None if not stored, whether sampled), the likeliest first.
    """

    text: str
    logprob: float | None
    candidates: tuple[tuple[str, float | None, bool], ...]


@dataclass(frozen=True)
class DocumentView:
    """A document's tokens with a teacher's candidates, and where they lie."""

    teacher: str
    block: int
    source: str
    signal_path: str
    tokens: tuple[TokenView, ...]


def view_document(
    store: Store, version: DatasetVersion, number: int, teacher: str | None = None, signal: str | None = None
) -> DocumentView:
    """Look at a document.

    Args:
        store: the store.
        version: of the dataset.
        number: of the document, in the plan's order.
        teacher: by name; the first one by default.
        signal: by name, with or without its selection, as ``describe_dataset`` has it; one over tokens by default. Of
            one over classes (``sparse@...``) a candidate is the token that all tokens of the class begin with.

    Raises:
        StoreError: no such document, teacher or signal.
    """
    manifest = version.manifest
    column = _sparse_of(manifest, teacher, signal)
    block, within = _locate(manifest, number)
    tokens_column = manifest.column(column.template["tokens"])
    assert tokens_column is not None, "a signal's tokens are in its manifest"
    tokens = read_tokens(store.column_part(tokens_column, block))
    part = store.column_part(column, block)
    begin, end = int(tokens.begins[within]), int(tokens.ends[within])
    rows = read_sparse(part).rows.slice_rows(begin, end)
    tokenizer = stored_tokenizer(store, manifest, tokens_column.id)
    texts = _candidate_texts(store, column, tokenizer)
    logprobs = [None if math.isnan(logprob) else logprob for logprob in rows.logprobs().tolist()]
    views = []
    for row, token in enumerate(tokens.ids[begin:end].tolist()):
        first, last = rows.offsets[row], rows.offsets[row + 1]
        candidates = tuple((texts(int(rows.ids[n])), logprobs[n], bool(rows.sampled[n])) for n in range(first, last))
        # Column 0 is the realised token itself; among the candidates it takes its place by log-prob.
        candidates = tuple(sorted(candidates, key=lambda found: math.inf if found[1] is None else -found[1]))
        views.append(TokenView(tokenizer.token_text(token), logprobs[first] if last > first else None, candidates))
    plan_block = manifest.plan.blocks[block]
    source = manifest.plan.sources[plan_block.sources[within]]
    return DocumentView(column.label, block, source, store.storage.child_url(part.path), tuple(views))


def _candidate_texts(store: Store, column: Column, tokenizer: Tokenizer) -> Callable[[int], str]:
    """What an id of a signal's entries is shown as."""
    if "projection" not in column.template:
        return tokenizer.token_text
    names = read_maps(store, column.template["projection"]["maps"]).class_tokens.tolist()
    # Behind the classes of tokens that name them come those that only one side has.
    return lambda number: (
        tokenizer.token_text(names[number]) if number < len(names) and names[number] >= 0 else "[rest]"
    )


def stored_tokenizer(store: Store, manifest: Manifest, tokens: str) -> Tokenizer:
    """The tokenizer of a tokens column (by its id), restored from the store's assets."""
    column = manifest.column(tokens)
    if column is None:
        raise StoreError(f"no tokens column {tokens[:16]} in this dataset version")
    rendering = column.template["rendering"]
    template = store.asset(rendering["template"]) if rendering["template"] else None
    return Tokenizer.from_asset(store.asset(column.template["tokenizer"]), rendering, template)


def _num_tokens(manifest: Manifest) -> int:
    """Tokens of the first teacher; of the first tokenizer while there is none."""
    signals = [column.template["tokens"] for column in manifest.find("signal")]
    tokens = [column for column in manifest.find("tokens") if not signals or column.id in signals]
    return tokens[0].stats.get("num_rows", 0) if tokens else 0


def _stored_bytes(manifest: Manifest, kind: str) -> int:
    return sum(column.cells.num_bytes for column in manifest.find(kind))


def _teachers(manifest: Manifest) -> list[dict[str, Any]]:
    names = dict.fromkeys(column.label for column in manifest.find("signal"))
    return [
        {
            "name": name,
            "fingerprint": next(c.template["teacher"] for c in manifest.find("signal") if c.label == name),
            "signals": [_signal_name(manifest, c) for c in manifest.find("signal") if c.label == name],
        }
        for name in names
    ]


def _signal_name(manifest: Manifest, column: Column) -> str:
    name, selection = column.template["signal"], column.template.get("selection")
    if name == PROJECTED:
        student = column.template["projection"]["student"]
        labels = [tokens.label for tokens in manifest.find("tokens", tokenizer=student)]
        name = f"sparse@{labels[0] if labels else student[:12]}"
    return name if selection is None else f"{name} {selection_name(selection)}"


def _alignments(manifest: Manifest) -> list[Column]:
    """Those that a student would read: of each pair of tokens the newest version."""
    pairs = (
        (column.template["teacher_tokens"], column.template["student_tokens"])
        for column in manifest.columns
        if column.kind == "alignment"
    )
    found = (find_alignment(manifest, *pair) for pair in dict.fromkeys(pairs))
    return [column for column in found if column is not None]


def describe_alignment(manifest: Manifest, column: Column) -> dict[str, Any]:
    """JSON-able: the pair of tokenizers and what their alignment covers."""
    teacher, student = (manifest.column(column.template[side]) for side in ("teacher_tokens", "student_tokens"))
    assert teacher is not None, "an alignment's tokens are in its manifest"
    assert student is not None, "an alignment's tokens are in its manifest"
    found = AlignmentStatistics(
        **{field.name: column.stats.get(field.name, 0) for field in fields(AlignmentStatistics)}
    )
    return {
        "teacher_tokenizer": teacher.label,
        "student_tokenizer": student.label,
        "coverage": found.coverage,
        "num_spans": found.num_spans,
        "num_one_to_one": found.num_one_to_one,
        "num_unproven_documents": found.num_unproven_documents,
        "num_unproven_tokens": found.num_unproven_tokens,
    }


def _column(store: Store, manifest: Manifest, column: Column) -> dict[str, Any]:
    rows = column.stats.get("num_rows", 0)
    arrays = {name.removeprefix("bytes."): size for name, size in column.stats.items() if name.startswith("bytes.")}
    first = next((column.cells[int(block)] for block in np.flatnonzero(column.cells.answered)[:1]), None)
    entries = column.stats.get("num_entries")
    return {
        "kind": column.kind,
        "label": column.label,
        "what": _signal_name(manifest, column) if column.kind == "signal" else column.kind,
        "id": column.id,
        "inputs": inputs_of(column.template),
        "num_rows": rows,
        "num_holes": column.num_holes,
        "entries_per_row": None if entries is None else entries / max(1, column.stats["num_scored"]),
        "bytes": arrays,
        "example": None if first is None else store.storage.child_url(f"parts/{first.part}"),
    }


def _sparse_of(manifest: Manifest, teacher: str | None, signal: str | None) -> Column:
    columns = [*manifest.find("signal", signal="sparse"), *manifest.find("signal", signal=PROJECTED)]
    named = [(column, _signal_name(manifest, column)) for column in columns if teacher in {None, column.label}]
    if not named:
        known = ", ".join(dict.fromkeys(column.label for column in columns)) or "none"
        raise StoreError(f"no sparse signal of teacher {teacher or '(any)'!r} in this dataset; teachers: {known}")
    found = [column for column, name in named if signal in {None, name, name.split(" ")[0]}]
    if not found:
        known = ", ".join(name for _, name in named)
        raise StoreError(f"no signal {signal!r} with candidates in this dataset; there are: {known}")
    return found[0]


def _locate(manifest: Manifest, number: int) -> tuple[int, int]:
    """Block, and number within it, of a document."""
    ends = np.cumsum(manifest.plan.blocks.num_documents)
    if not 0 <= number < ends[-1]:
        raise StoreError(f"document {number}: the dataset has documents 0 to {ends[-1] - 1}")
    block = int(np.searchsorted(ends, number, side="right"))
    return block, number - int(ends[block]) + int(manifest.plan.blocks.num_documents[block])
