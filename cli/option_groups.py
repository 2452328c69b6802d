"""Options that belong together, as one decorator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Command = TypeVar("Command", bound=Callable[..., Any])


def option_group(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that adds ``options`` to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
