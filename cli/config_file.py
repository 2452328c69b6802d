"""``--config FILE.yaml``: the options of a command, by the same names; the command line wins over the file."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from logitstore.errors import ConfigError


def config_option() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--config",
        type=click.Path(dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_read_into_defaults,
        help="YAML file with options of this command, by the same names.",
    )


def _read_into_defaults(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    known = {name: parameter for parameter in context.command.params for name in _spellings(parameter)}
    values = {}
    for key, value in _read_mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            raise ConfigError(f"{path}: unknown key {key!r}; did you mean {nearest[0].replace('_', '-')!r}?")
        values[str(known[name].name)] = _as_typed(known[name], value)
    context.default_map = {**(context.default_map or {}), **values}


def _spellings(parameter: click.Parameter) -> list[str]:
    """The long names of an option, as on the command line but for dashes; none for ``--config`` itself."""
    if parameter.name == "config":
        return []
    return [spelling.lstrip("-").replace("-", "_") for spelling in parameter.opts if len(spelling) > 2]


def _read_mapping(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of option names to values, found {type(values).__name__}")
    return values


def _as_typed(parameter: click.Parameter, value: Any) -> Any:
    """What YAML gives, as it would have been typed: a list for options that repeat, text for the rest."""
    if isinstance(value, dict):
        value = [f"{key}={item}" for key, item in value.items()]
    if parameter.multiple:
        return value if value is None or isinstance(value, list) else [value]
    return ",".join(map(str, value)) if isinstance(value, list) else value
