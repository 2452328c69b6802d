"""``logitstore verify``: recompute every digest of a store, and mend what does not hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from logitstore.cli.progress import Bar

if TYPE_CHECKING:
    from logitstore.repair import Repaired
    from logitstore.store import Store
    from logitstore.verification import Verified


def _parse_sample(context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        share = float(value.removesuffix("%"))
    except ValueError:
        share = -1.0
    if not 0 < share <= 100:
        raise click.BadParameter(f"{value!r}: expected per cent of the parts, as in 5 or 2.5%")
    return share


@click.command()
@click.argument("store")
@click.option("--dataset", metavar="NAME", help="Only what the versions of this dataset refer to.")
@click.option(
    "--sample",
    default="100",
    metavar="PERCENT",
    callback=_parse_sample,
    help="Read a random share of the parts, as in 5; all records and manifests in any case.",
)
@click.option("--seed", type=click.IntRange(0), help="Of the sample; another one every time if not given.")
@click.option("--repair", is_flag=True, help="Drop damaged answers, so that `produce` makes exactly those again.")
@click.option("--from", "source", metavar="URL", help="With --repair: restore from a copy of the store instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(
    store: str, dataset: str | None, sample: float, seed: int | None, repair: bool, source: str | None, as_json: bool
) -> int:
    """Check every object of STORE. Exits with 1 if any is damaged, and names each.

    With --repair it exits with 0 if all damage was restored, or dropped for `produce` to make again. Manifests are
    never dropped.
    """
    from logitstore.errors import ConfigError
    from logitstore.store import Store
    from logitstore.verification import verify as check

    if source is not None and not repair:
        raise ConfigError("--from: goes with --repair")
    opened = _open(store, repair=repair)
    origin = None if source is None else Store.open(source).storage
    with Bar(quiet=as_json) as bar:
        bar.start("verifying", None)
        found = check(opened, bar.show, dataset=dataset, sample=sample, seed=seed)
        repaired = _repair(opened, found, origin, bar, dataset) if repair and found.damage else None
    _print(found, repaired, as_json)
    return 1 if (found.damage if repaired is None else repaired.beyond) else 0


def _open(url: str, *, repair: bool) -> Store:
    """A store; one that is to be repaired even if its header is damaged."""
    from logitstore.errors import DamageError
    from logitstore.storage import open_storage
    from logitstore.store import Store

    try:
        return Store.open(url)
    except DamageError:
        if not repair:
            raise
        return Store(open_storage(url))


def _repair(store: Store, found: Verified, source: Any, bar: Bar, dataset: str | None) -> Repaired:
    """Repair until nothing more comes to light: behind a damaged manifest there may be more."""
    from logitstore.repair import Repaired
    from logitstore.repair import repair as mend
    from logitstore.verification import verify as check

    total = Repaired()
    while True:
        bar.start("repairing", None)
        done = mend(store, found, source, bar.show)
        total.restored += done.restored
        total.dropped += done.dropped
        total.beyond = done.beyond
        if not any(target.split("/")[0] in {"manifests", "plans", "datasets"} for target in done.restored):
            return total
        bar.start("verifying again", None)
        found = check(store, bar.show, dataset=dataset)


def _print(found: Verified, repaired: Repaired | None, as_json: bool) -> None:
    if as_json:
        values: dict[str, Any] = {
            "faults": list(found.faults),
            "num_objects": found.num_objects,
            "num_parts": found.num_parts,
            "num_left_out": found.num_left_out,
            "num_uncommitted": found.num_uncommitted,
        }
        click.echo(json.dumps(values | ({} if repaired is None else vars(repaired)), indent=1))
        return
    for fault in found.faults:
        click.echo(fault)
    click.echo(
        f"{found.num_parts} parts and {found.num_objects} other objects: "
        + (f"{len(found.faults)} damaged" if found.faults else "every digest holds")
        + (f"; {found.num_left_out} parts were left out of the sample" if found.num_left_out else "")
        + (f"; {found.num_uncommitted} uncommitted parts (harmless)" if found.num_uncommitted else "")
    )
    if repaired is not None:
        click.echo(f"{len(repaired.restored)} restored, {len(repaired.dropped)} dropped, {len(repaired.beyond)} left")
        if repaired.dropped:
            click.echo("run `logitstore produce` again with the same options (and --data): it makes what was dropped")
        for target, advice in repaired.beyond.items():
            click.echo(f"{target}: {advice}")
