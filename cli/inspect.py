"""``logitstore inspect``: what is in a store, and what a teacher said about a document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from logitstore.cli.align import alignment_line
from logitstore.cli.sizes import human_size

if TYPE_CHECKING:
    from rich.console import Console

    from logitstore.inspection import DocumentView

_CANDIDATES = 8
_PIPE_WIDTH = 200


@click.command()
@click.argument("store")
@click.option("--dataset", metavar="NAME", help="One dataset, with its sizes by array.")
@click.option("--dataset-version", type=click.IntRange(1), help="The newest if not given.")
@click.option("--pin", metavar="DIGEST", help="The manifest digest that the version must have, or its beginning.")
@click.option("--document", type=click.IntRange(0), help="Show a document's tokens with the teacher's candidates.")
@click.option("--teacher", metavar="NAME", help="Whose candidates; the first teacher's if not given.")
@click.option(
    "--signal", metavar="NAME", help="Which candidates, e.g. sparse@TOKENIZER; those over tokens if not given."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(
    store: str,
    dataset: str | None,
    dataset_version: int | None,
    pin: str | None,
    document: int | None,
    teacher: str | None,
    signal: str | None,
    as_json: bool,
) -> None:
    """Show what STORE holds: datasets, sizes, teachers, coverage; or one document as its teacher saw it."""
    from logitstore.errors import ConfigError
    from logitstore.inspection import describe_dataset, describe_store, view_document
    from logitstore.store import Store

    opened = Store.open(store)
    if dataset is None:
        if document is not None:
            raise ConfigError("--document: name its --dataset")
        found = describe_store(opened)
        click.echo(json.dumps(found, indent=1) if as_json else _render_store(found))
        return
    version = opened.dataset(dataset, dataset_version, pin=pin)
    if document is not None:
        view = view_document(opened, version, document, teacher, signal)
        if as_json:
            click.echo(json.dumps(asdict(view), indent=1, ensure_ascii=False))
        else:
            _show_document(view)
        return
    description = describe_dataset(opened, version)
    if as_json:
        click.echo(json.dumps(description, indent=1))
    else:
        _show_dataset(description)


def _render_store(found: dict[str, Any]) -> str:
    lines = [found["store"]]
    for name, dataset in found["datasets"].items():
        teachers = ", ".join(teacher["name"] for teacher in dataset["teachers"]) or "no teacher yet"
        lines.append(
            f"  {name} (version {dataset['version']}): {dataset['num_documents']:,} documents, "
            f"{dataset['num_tokens']:,} tokens, {human_size(dataset['total_bytes'])}; {teachers}"
        )
    return "\n".join(lines if found["datasets"] else [*lines, "  no dataset yet"])


def _show_dataset(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = _console()
    console.print(f"[bold]{found['dataset']}[/] version {found['version']}, manifest {found['manifest_digest']}")
    console.print(
        f"{found['num_documents']:,} documents ({found['num_held_out_documents']:,} held out) in "
        f"{found['num_blocks']:,} blocks, {human_size(found['num_text_bytes'])} of text, {found['num_tokens']:,} tokens"
    )
    table = Table("column", "what", "array", "stored", "bytes/token", "rows", "holes", box=None, pad_edge=False)
    for column in found["columns"]:
        what = column["what"]
        if column["entries_per_row"] is not None:
            what += f" ({column['entries_per_row']:.1f} entries a row)"
        for number, (array, size) in enumerate(sorted(column["bytes"].items(), key=lambda item: -item[1])):
            per_token = f"{size / found['num_tokens']:.2f}" if found["num_tokens"] else "-"
            first = (column["label"], what) if number == 0 else ("", "")
            last = (f"{column['num_rows']:,}", str(column["num_holes"])) if number == 0 else ("", "")
            table.add_row(*first, array, human_size(size), per_token, *last)
    console.print(table)
    for alignment in found["alignments"]:
        console.print(alignment_line(alignment))
    total = found["bytes_per_token"]["total"]
    console.print(f"total {human_size(found['total_bytes'])}" + (f", {total:.1f} bytes/token" if total else ""))
    for column in found["columns"]:
        if column["example"] is not None:
            opened, what = f"zarr.open_group({column['example']!r})", f"{column['what']} of {column['label']}"
            console.print(f"{opened}  # {what}, first block", style="dim", markup=False)


def _show_document(view: DocumentView) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    console.print(f"from {view.source}, block {view.block}, as {view.teacher} saw it; {view.signal_path}", markup=False)
    table = Table("token", "p", "candidates (~ sampled)", box=None, pad_edge=False)
    for token in view.tokens:
        shown = Text()
        for text, logprob, sampled in token.candidates[:_CANDIDATES]:
            style = "bold green" if text == token.text else ""
            shown.append(_quoted(text), style=style).append(
                f"{'~' if sampled else ' '}{'' if logprob is None else _percent(logprob)}  ", style="dim"
            )
        if len(token.candidates) > _CANDIDATES:
            shown.append(f"+{len(token.candidates) - _CANDIDATES}", style="dim")
        table.add_row(Text(_quoted(token.text)), "" if token.logprob is None else _percent(token.logprob), shown)
    console.print(table)


def _console() -> Console:
    """Lines are never broken: digests and paths are there to be copied. A pipe has room for any table."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=_PIPE_WIDTH)


def _quoted(text: str) -> str:
    """Quotes show where a token's spaces are; what cannot be printed is escaped already."""
    return f"'{text}'"


def _percent(logprob: float) -> str:
    import math

    return f"{math.exp(logprob):.1%}"
