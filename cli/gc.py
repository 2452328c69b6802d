"""``logitstore gc``: free what no dataset version, pin or live worker refers to."""

from __future__ import annotations

import json
import re

import click

from logitstore.cli.progress import Bar
from logitstore.cli.sizes import human_size

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_grace(context: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r}: expected a time, as in 7d, 12h, 30m or 0s")
    return float(match[1]) * _SECONDS[match[2]]


@click.command()
@click.argument("store")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--grace",
    default="7d",
    show_default=True,
    metavar="TIME",
    callback=_parse_grace,
    help="Age from which an object may be judged, and time between its sentence and its deletion: 7d, 12h, 30m, 0s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def gc(store: str, dry_run: bool, grace: float, as_json: bool) -> None:
    """Free what nothing in STORE refers to, in two runs that are --grace apart.

    The first run finds what neither a dataset version nor a pin nor a live worker refers to, and takes it from those
    who look for answers. A later one looks again and deletes it. Workers may go on meanwhile.
    """
    from logitstore.garbage import collect
    from logitstore.store import Store

    opened = Store.open(store)
    with Bar(quiet=as_json) as bar:
        bar.start("collecting", None)
        done = collect(opened, grace, dry_run=dry_run, progress=bar.show)
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, **vars(done)}, indent=1))
        return
    would = "would be " if dry_run else ""
    click.echo(f"{len(done.freed)} {would}freed ({human_size(done.num_bytes_freed)})")
    click.echo(
        f"{len(done.sentenced)} found unreachable ({human_size(done.num_bytes_sentenced)}): a run after the grace "
        "period frees them"
    )
    click.echo(f"{len(done.waiting)} still in their grace period, {len(done.reprieved)} {would}kept after all")
    click.echo(f"{done.num_kept} kept, {done.num_swept} expired or half-written files {would}swept")
