"""``logitstore verify``: recompute every digest of a store."""

from __future__ import annotations

import json

import click

from logitstore.cli.progress import Bar


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(store: str, as_json: bool) -> int:
    """Check every object of STORE. Exits with 1 if any is damaged, and names each."""
    from logitstore.store import Store
    from logitstore.verification import verify as check

    opened = Store.open(store)
    with Bar(quiet=as_json) as bar:
        bar.start("verifying", None)
        found = check(opened, bar.show)
    if as_json:
        click.echo(json.dumps(vars(found), indent=1))
    else:
        for fault in found.faults:
            click.echo(fault)
        click.echo(
            f"{found.num_parts} parts and {found.num_objects} other objects: "
            + (f"{len(found.faults)} damaged" if found.faults else "every digest holds")
            + (f"; {found.num_uncommitted} uncommitted parts (harmless)" if found.num_uncommitted else "")
        )
    return 1 if found.faults else 0
