"""``logitstore align``: add a student's tokenizer to a dataset, without any teacher."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from logitstore.cli.config_file import config_option
from logitstore.cli.progress import AlignBar
from logitstore.cli.tokenizer_options import load_students, read_template, tokenizer_options

if TYPE_CHECKING:
    from logitstore.aligning import AlignReport


@click.command()
@click.argument("store")
@click.option("--dataset", required=True, metavar="NAME", help="Name of the dataset in the store.")
@tokenizer_options(required=True)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@config_option()
def align(
    store: str, dataset: str, student_tokenizer: tuple[str, ...], chat_template: str | None, as_json: bool
) -> None:
    """Add the tokens of students' tokenizers to a dataset, and their alignment with every teacher's.

    STORE is a folder or any fsspec URL. Needs no GPU and no model. Killed runs go on where they were, finished ones do
    nothing, and any number of processes may run on one store at once.
    """
    from logitstore.aligning import align_dataset
    from logitstore.store import Store, check_dataset_name

    check_dataset_name(dataset)
    opened = Store.open(store)
    students = load_students(student_tokenizer, read_template(chat_template))
    began = time.monotonic()
    with AlignBar(quiet=as_json) as bar:
        report = align_dataset(opened, dataset, students, bar)
    seconds = time.monotonic() - began
    click.echo(json.dumps(_values(report, seconds), indent=1) if as_json else "\n".join(_lines(report, seconds)))


def _values(report: AlignReport, seconds: float) -> dict[str, Any]:
    return {
        "dataset": report.dataset.name,
        "version": report.dataset.number,
        "manifest_digest": report.dataset.manifest.identity,
        "num_filled_blocks": report.num_filled_blocks,
        "alignments": report.alignments,
        "same_tokens": report.same_tokens,
        "seconds": seconds,
    }


def _lines(report: AlignReport, seconds: float) -> list[str]:
    lines = [f"filled {report.num_filled_blocks} blocks in {seconds:.1f} s"]
    if report.num_filled_blocks == 0:
        lines = ["every block was aligned already"]
    lines += [f"{teacher} -> {student}: the same tokens, nothing to align" for teacher, student in report.same_tokens]
    lines += [alignment_line(found) for found in report.alignments]
    version = report.dataset
    return [*lines, f"dataset {version.name!r} version {version.number}: manifest {version.manifest.identity}"]


def alignment_line(found: dict[str, Any]) -> str:
    """An alignment as ``inspection.describe_alignment`` describes it."""
    pair = f"{found['teacher_tokenizer']} -> {found['student_tokenizer']}"
    line = f"alignment {pair}: {found['coverage']:.2%} of the student's tokens in {found['num_spans']:,} spans"
    if found["num_unproven_documents"]:
        line += (
            f"; {found['num_unproven_documents']:,} documents with {found['num_unproven_tokens']:,} of its tokens are "
            "not, because the bytes of their tokens are not proven"
        )
    return line
