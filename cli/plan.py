"""``logitstore plan``: read a corpus, cut it into blocks, and split off what is held out."""

from __future__ import annotations

from typing import Any

import click

from logitstore.cli.config_file import config_option
from logitstore.cli.corpus_options import corpus_options, make_plan
from logitstore.cli.progress import Bar


@click.command()
@click.argument("store")
@corpus_options
@config_option()
def plan(store: str, dataset: str, **corpus: Any) -> None:
    """Write the plan of a corpus: blocks of documents and the held-out split.

    STORE is a folder or any fsspec URL. `logitstore produce --data` does this by itself.
    """
    from logitstore.columns import next_manifest
    from logitstore.errors import ConfigError
    from logitstore.heartbeats import alive
    from logitstore.store import Store, check_dataset_name

    check_dataset_name(dataset)
    if not corpus["data"]:
        raise ConfigError("--data: name the corpus to plan")
    opened = Store.open_or_create(store)
    with alive(opened.storage):
        with Bar() as bar:
            digest, lines = make_plan(opened, bar, dataset=dataset, **corpus)
        version = opened.publish(dataset, lambda current: next_manifest(opened, current, digest, {}))
    click.echo("\n".join(lines))
    click.echo(f"dataset {dataset!r} version {version.number}: manifest {version.manifest.identity}")
