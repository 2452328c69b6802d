"""The options that name a corpus, shared by ``plan`` and ``produce``, and what they come to: a plan in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from logitstore.cli.option_groups import option_group
from logitstore.cli.progress import Bar
from logitstore.errors import ConfigError

if TYPE_CHECKING:
    from logitstore.store import Store

corpus_options = option_group(
    click.option(
        "--data", multiple=True, metavar="GLOB", help="Corpus: a file, folder, glob or fsspec URL; repeatable."
    ),
    click.option("--dataset", required=True, metavar="NAME", help="Name of the dataset in the store."),
    click.option("--fields", metavar="NAME=FIELD,...", help="Other names of the rows' fields, e.g. text=body."),
    click.option(
        "--on-error",
        type=click.Choice(["raise", "skip"]),
        default="raise",
        show_default=True,
        help="For unreadable rows.",
    ),
    click.option(
        "--held-out",
        type=click.FloatRange(0, 0.9),
        help="Share of documents held out for validation, by digest of their prompt; 0.05 if not given. Fixed with the "
        "first plan.",
    ),
    click.option(
        "--block-bytes", type=click.IntRange(1024), help="Mean text of a block; by the corpus size if not given."
    ),
)


def make_plan(
    store: Store,
    bar: Bar,
    *,
    dataset: str,
    data: Sequence[str],
    fields: str | None,
    on_error: str,
    held_out: float | None,
    block_bytes: int | None,
) -> tuple[str, list[str]]:
    """The plan of a dataset: of the corpus if one is named, else of its newest version.

    Returns:
        The plan's digest, and lines to tell the user.
    """
    from logitstore.corpus import FieldMap
    from logitstore.corpus_files import list_files
    from logitstore.ingest import ingest
    from logitstore.plan import DEFAULT_HELD_OUT, PlanSettings

    newest = store.find_dataset(dataset)
    current = newest.manifest if newest else None
    if not data:
        if current is None:
            raise ConfigError(f"dataset {dataset!r} does not exist yet: name its corpus with --data")
        return current.plan_digest, []
    files = list_files(data)
    num_bytes = sum(file.size for file in files)
    share = DEFAULT_HELD_OUT if held_out is None else held_out
    settings = current.plan.settings if current else PlanSettings.for_corpus(num_bytes, share, block_bytes)
    bar.start("reading", None)
    names = FieldMap.parse(fields) if fields else FieldMap()
    found = ingest(store, files, settings, names, on_error, lambda document: bar.add(0, note=document.source), current)
    blocks = found.plan.blocks
    num_documents, num_bytes = int(blocks.num_documents.sum()), int(blocks.num_bytes.sum())
    lines = [f"plan: {num_documents} documents in {len(blocks)} blocks, {num_bytes:,} bytes"]
    if found.report is None:
        lines[0] += " (corpus unchanged, not read again)"
    elif found.report.num_skipped:
        lines.append(f"skipped {found.report.num_skipped} unreadable rows, the first: {found.report.errors[0]}")
    if blocks.num_duplicates:
        lines.append(f"{blocks.num_duplicates} exact duplicates, stored once")
    return found.plan_digest, lines
