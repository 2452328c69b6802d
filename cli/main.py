"""``logitstore``: the command line. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from logitstore.cli.align import align
from logitstore.cli.copy import copy
from logitstore.cli.dataset import dataset
from logitstore.cli.gc import gc
from logitstore.cli.inspect import inspect
from logitstore.cli.plan import plan
from logitstore.cli.produce import produce
from logitstore.cli.train import train
from logitstore.cli.verify import verify
from logitstore.errors import LogitStoreError

USER_ERROR, INTERRUPTED = 2, 130
_EXTRA_PACKAGES = ("torch", "transformers", "safetensors", "tensorboard")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="logitstore")
def cli() -> None:
    """Run the teacher once, keep its logits in a store, train any number of students from it."""


for command in (plan, produce, align, train, inspect, verify, copy, dataset, gc):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 a check failed, 2 a user's error, 130 interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Before torch loads OpenMP: threads that spin at every barrier are several times slower on a machine that also does
    # something else, and hardly faster on one that does not.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        sys.exit(cli.main(arguments, prog_name="logitstore", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(USER_ERROR)
    except click.ClickException as error:
        _refuse(error.format_message())
    except LogitStoreError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_PACKAGES:
            raise
        _refuse(f"{error.name} is not installed; this command needs it: pip install 'logitstore[producer,train]'")
    except OSError as error:  # any file system may refuse at any time
        _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. What was committed is kept; the same command goes on from there.", err=True)
        sys.exit(INTERRUPTED)


def _refuse(message: str) -> NoReturn:
    """One line, whatever it is made of, and the exit code of a user's error."""
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    sys.exit(USER_ERROR)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
