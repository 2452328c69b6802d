"""``logitstore copy``: datasets from one store to another."""

from __future__ import annotations

import json
from typing import Any

import click

from logitstore.cli.progress import Bar
from logitstore.cli.sizes import human_size


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--dataset", "names", multiple=True, metavar="NAME[@N]", help="Which, and which version; repeatable.")
@click.option("--as", "new_name", metavar="NAME", help="Another name at the destination, for one dataset.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def copy(source: str, destination: str, names: tuple[str, ...], new_name: str | None, as_json: bool) -> None:
    """Copy datasets (the newest version of each, or of those named) from store SOURCE to store DESTINATION.

    What is there already is skipped, every object is checked on the way, and a killed copy goes on when the same
    command is given again. A copy becomes the next version of the dataset of its name, if that one descends from an
    older version of it; another dataset of that name is refused.
    """
    from logitstore.copying import copy_dataset
    from logitstore.errors import ConfigError
    from logitstore.store import Store, check_dataset_name

    origin = Store.open(source)
    records = [_find(origin, text) for text in (names or origin.datasets())]
    if new_name is not None:
        check_dataset_name(new_name)
        if len(records) != 1:
            raise ConfigError(f"--as {new_name}: name one dataset to copy, not {len(records)}")
    target = Store.open_or_create(destination)
    if target.storage.url == origin.storage.url:
        raise ConfigError(f"{destination}: is the store to copy from")
    done: list[dict[str, Any]] = []
    with Bar(quiet=as_json) as bar:
        for record in records:
            bar.start(f"copying {record.name}", None)
            copied = copy_dataset(origin, target, record, new_name, bar.show_bytes)
            ((name, number),) = copied.number.items()
            moved = {field: value for field, value in vars(copied).items() if field != "number"}
            done.append({"dataset": name, "version": number, "manifest_digest": record.identity, **moved})
            if not as_json:
                click.echo(
                    f"dataset {name!r} version {number}: {copied.num_objects} objects copied "
                    f"({human_size(copied.num_bytes)}), {copied.num_skipped} there already; manifest {record.identity}"
                )
    if as_json:
        click.echo(json.dumps({"copied": done}, indent=1))


def _find(store: Any, text: str) -> Any:
    from logitstore.errors import ConfigError
    from logitstore.versions import find_version

    name, _, number = text.partition("@")
    if number and not number.isdecimal():
        raise ConfigError(f"--dataset {text}: expected NAME or NAME@N with N a version's number")
    return find_version(store.storage, name, int(number) if number else store.dataset(name).number)
