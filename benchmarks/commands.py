"""The commands of logitstore, run as a shell would, in this process."""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stdout
from typing import Any


def logitstore(*arguments: str) -> None:
    """Run a command, and show it."""
    from logitstore.cli.main import cli

    print("$ logitstore", *arguments, flush=True)
    if cli.main(list(arguments), prog_name="logitstore", standalone_mode=False):
        raise SystemExit(1)


def logitstore_json(*arguments: str) -> dict[str, Any]:
    """Run a command with ``--json`` and return what it printed."""
    from logitstore.cli.main import cli

    print("$ logitstore", *arguments, "--json", flush=True)
    printed, began = io.StringIO(), time.monotonic()
    with redirect_stdout(printed):
        cli.main([*arguments, "--json"], prog_name="logitstore", standalone_mode=False)
    print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return json.loads(printed.getvalue())
