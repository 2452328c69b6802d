"""``logitstore produce``: run teachers over a corpus and keep what they say."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from logitstore.cli.config_file import config_option
from logitstore.cli.corpus_options import corpus_options, make_plan
from logitstore.cli.option_groups import option_group
from logitstore.cli.progress import ProduceBar, hide_model_bars
from logitstore.cli.tokenizer_options import load_projections, load_students, read_template, tokenizer_options

teacher_run_options = option_group(
    click.option(
        "--signals",
        default="scalars,sparse",
        show_default=True,
        help="Which signals to store: scalars, sparse, "
        "and sparse@TOKENIZER for sparse rows on the classes that the teacher's vocabulary shares with that of a "
        "folder, hub id or label of a --student-tokenizer.",
    ),
    click.option(
        "--select",
        default="threshold:12",
        show_default=True,
        help="Sparse entries: threshold:N (N on average, likely ones for certain, others by unbiased sampling), "
        "threshold:THETA, sample:N (N draws), topk:K, topp:P,max=K, given:URL (Parquet: document, position, ids), or "
        "several joined by +.",
    ),
    click.option(
        "--temperatures",
        default="1",
        show_default=True,
        help="Temperatures to train at, e.g. 1,2 (other than 1: nothing sampled).",
    ),
    click.option("--logprob-step", type=float, default=0.1, show_default=True, help="Rounding of log-probs, in nats."),
    click.option(
        "--tail-step", type=float, help="Let that grow to this many nats for unlikely tokens: smaller stores."
    ),
    click.option(
        "--sampled-logprobs/--no-sampled-logprobs",
        default=False,
        show_default=True,
        help="Keep log-probs of sampled entries; at temperature 1 students do without.",
    ),
    click.option("--portable", is_flag=True, help="Store with standard Zarr codecs only, at several times the size."),
    click.option("--log-z", is_flag=True, help="Keep the raw log Z of every row among the scalars."),
    click.option("--max-length", type=int, help="Tokens a teacher sees at once; its context length if not given."),
    click.option("--overlap", type=int, help="Context that windows of long documents repeat; a quarter of a window."),
    click.option("--dtype", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), default="auto", show_default=True),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ..."),
    click.option("--batch-tokens", type=click.IntRange(1), help="Tokens of a packed batch."),
    click.option("--deterministic/--no-deterministic", default=None, help="Bitwise repeatable; the default on a CPU."),
    click.option("--threads", type=click.IntRange(1), help="CPU threads of torch; all if not given."),
    click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of sampled entries."),
    click.option("--allow-pickle", is_flag=True, help="Load *.bin weights, which can run any code."),
    click.option("--trust-remote-code", is_flag=True, help="Run the teacher's own modelling code."),
)


@click.command()
@click.argument("store")
@corpus_options
@click.option(
    "--teacher", multiple=True, required=True, metavar="[NAME=]MODEL[@REVISION]", help="Folder or hub id; repeatable."
)
@tokenizer_options(required=False)
@teacher_run_options
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@config_option()
def produce(
    store: str,
    dataset: str,
    teacher: tuple[str, ...],
    student_tokenizer: tuple[str, ...],
    chat_template: str | None,
    data: tuple[str, ...],
    fields: str | None,
    on_error: str,
    held_out: float | None,
    block_bytes: int | None,
    signals: str,
    temperatures: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Score a corpus with one or more teachers.

    STORE is a folder or any fsspec URL; it is made if there is nothing. Killed runs go on where they were, finished
    ones do nothing, and grown corpora are scored only where they grew.
    """
    from logitstore.heartbeats import alive
    from logitstore.producer.request import ProduceConfig, TeacherRequest
    from logitstore.producer.run import produce as run
    from logitstore.store import Store, check_dataset_name

    check_dataset_name(dataset)
    template = read_template(chat_template)
    config = ProduceConfig(signals=_names(signals), temperatures=_numbers("--temperatures", temperatures), **options)
    config.check_device()
    requests = [TeacherRequest.parse(text, config, template) for text in teacher]
    check_distinct([request.name for request in requests])
    students = load_students(student_tokenizer, template)
    projections = load_projections(config.signals, students, template)
    hide_model_bars()  # only now: what the hub downloads is worth a bar
    opened = Store.open_or_create(store)
    began = time.monotonic()
    with alive(opened.storage), ProduceBar(quiet=as_json) as bar:
        digest, lines = make_plan(
            opened,
            bar,
            dataset=dataset,
            data=data,
            fields=fields,
            on_error=on_error,
            held_out=held_out,
            block_bytes=block_bytes,
        )
        report = run(
            opened,
            dataset,
            digest,
            requests,
            students,
            config,
            bar,
            replaces_plan=bool(data),
            projections=projections,
        )
    seconds = time.monotonic() - began
    if as_json:
        values = {
            "dataset": dataset,
            "version": report.dataset.number,
            "manifest_digest": report.dataset.manifest.identity,
            "num_scored_blocks": report.num_scored_blocks,
            "num_forward_tokens": report.num_forward_tokens,
            "seconds": seconds,
        }
        click.echo(json.dumps(values, indent=1))
        return
    click.echo("\n".join(lines) if lines else f"plan: that of dataset {dataset!r}")
    if report.num_forward_tokens == 0:
        click.echo("every block was scored already: no teacher forward was run")
    else:
        click.echo(
            f"scored {report.num_scored_blocks} blocks, {report.num_forward_tokens:,} tokens through a teacher in "
            f"{seconds:.1f} s ({report.num_forward_tokens / seconds:,.0f} tokens/s)"
        )
    click.echo(f"dataset {dataset!r} version {report.dataset.number}: manifest {report.dataset.manifest.identity}")


def check_distinct(names: list[str]) -> None:
    from logitstore.errors import ConfigError

    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two teachers are called {name!r}: give names, as in --teacher NAME=MODEL")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[float, ...]:
    from logitstore.errors import ConfigError

    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected numbers, as in 1,2") from None
