"""Commands as a shell sees them: exit code, standard output and standard error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from logitstore.cli.main import main

COMMAND = [sys.executable, "-m", "logitstore.cli.main"]


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line of a user's error; fails if it is anything else."""
        assert self.code == 2, self
        assert self.out == "", self
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("Error: "), self.err
        return self.err.removeprefix("Error: ").rstrip("\n")


def run_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run a command through its real entry point, in this process."""
    capsys.readouterr()
    before, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    try:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
    finally:
        signal.signal(signal.SIGTERM, before)
        os.environ.clear()
        os.environ.update(environment)
    found = capsys.readouterr()
    return Ran(int(ended.value.code or 0), found.out, found.err)


def run_apart(arguments: Sequence[str]) -> Ran:
    """Run a command in a process of its own."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)
