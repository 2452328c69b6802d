"""``logitstore dataset``: list, drop and pin the versions of datasets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from logitstore.cli.sizes import human_size

if TYPE_CHECKING:
    from logitstore.store import Store
    from logitstore.versions import VersionRecord


@click.group()
def dataset() -> None:
    """List, drop and pin versions of datasets."""


@dataset.command("list")
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_versions(store: str, as_json: bool) -> None:
    """Show all versions of all datasets in STORE."""
    from logitstore.pins import list_pins
    from logitstore.store import Store
    from logitstore.versions import read_version

    opened = Store.open(store)
    pinned = {pin.identity for pin in list_pins(opened.storage)}
    records = [read_version(opened.storage, name, number) for name, number in opened.versions()]
    described = [_describe(opened, record, record.identity in pinned) for record in records]
    if as_json:
        click.echo(json.dumps({"versions": described}, indent=1))
        return
    for version in described:
        state = f"dropped {version['dropped']}" if version["dropped"] else human_size(version["num_bytes"])
        state += ", pinned" if version["pinned"] else ""
        digest = version["manifest_digest"]
        click.echo(f"{version['dataset']} version {version['version']} of {version['created']}: {digest} ({state})")
    if not described:
        click.echo(f"{opened.storage.url}: no dataset yet")


@dataset.command()
@click.argument("store")
@click.argument("name")
@click.option("--version", "number", type=click.IntRange(1), help="This one; all if neither option is given.")
@click.option("--keep-last", type=click.IntRange(1), metavar="K", help="All but the newest K.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print what was dropped as JSON.")
def drop(store: str, name: str, number: int | None, keep_last: int | None, yes: bool, as_json: bool) -> None:
    """Give up versions of dataset NAME in STORE. `logitstore gc` then frees what only they refer to.

    Numbers of dropped versions are never used again.
    """
    from logitstore.errors import ConfigError
    from logitstore.store import Store
    from logitstore.versions import drop_version

    if number is not None and keep_last is not None:
        raise ConfigError("--version and --keep-last: give one of them")
    opened = Store.open(store)
    records = _to_drop(opened, name, number, keep_last)
    numbers = sorted(record.number for record in records)
    if records and not yes:
        click.confirm(f"Drop {name!r} version {', '.join(map(str, numbers))}?", abort=True, err=True)
    for record in records:
        drop_version(opened.storage, record)
    if as_json:
        click.echo(json.dumps({"dataset": name, "dropped": numbers}, indent=1))
    else:
        what = f"version {', '.join(map(str, numbers))}" if numbers else "nothing"
        click.echo(f"dropped {what} of dataset {name!r}" + ("; `logitstore gc` frees the space" if numbers else ""))


@dataset.command()
@click.argument("store")
@click.argument("name")
@click.option("--version", "number", type=click.IntRange(1), help="The newest if not given.")
def pin(store: str, name: str, number: int | None) -> None:
    """Keep what a version of dataset NAME refers to, even when the version is dropped."""
    from logitstore.pins import pin as keep
    from logitstore.store import Store
    from logitstore.versions import find_version

    opened = Store.open(store)
    made = keep(opened.storage, find_version(opened.storage, name, number or opened.dataset(name).number))
    click.echo(f"pinned {made.name!r} version {made.number}: --pin {made.identity}")


@dataset.command()
@click.argument("store")
@click.argument("digest")
def unpin(store: str, digest: str) -> None:
    """Lift the pin on a manifest, by its DIGEST or the beginning of it."""
    from logitstore.errors import StoreError
    from logitstore.pins import list_pins
    from logitstore.pins import unpin as lift
    from logitstore.store import Store
    from logitstore.versions import matches_pin

    opened = Store.open(store)
    found = [each for each in list_pins(opened.storage) if matches_pin(each.identity, digest)]
    if len(found) != 1:
        raise StoreError(f"{opened.storage.url}: {len(found)} pins begin with {digest}")
    lift(opened.storage, found[0])
    click.echo(f"unpinned {found[0].identity}")


def _to_drop(store: Store, name: str, number: int | None, keep_last: int | None) -> list[VersionRecord]:
    from logitstore.errors import StoreError
    from logitstore.versions import find_version, kept_versions, list_numbers

    if number is not None:
        return [find_version(store.storage, name, number)]
    if not list_numbers(store.storage, name):
        known = ", ".join(store.datasets()) or "none yet"
        raise StoreError(f"{store.storage.url}: no dataset {name!r}; there are: {known}")
    return list(kept_versions(store.storage, name))[keep_last or 0 :]


def _describe(store: Store, record: VersionRecord, pinned: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "dataset": record.name,
        "version": record.number,
        "manifest_digest": record.identity,
        "created": record.created,
        "dropped": record.dropped or None,
        "pinned": pinned,
        "num_bytes": None,
    }
    if not record.dropped:
        manifest = store.manifest(record.manifest)
        described["num_bytes"] = sum(column.cells.num_bytes for column in manifest.columns)
    return described
