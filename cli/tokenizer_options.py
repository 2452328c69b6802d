"""The options that name students' tokenizers, shared by ``produce`` and ``align``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from logitstore.cli.option_groups import Command, option_group

if TYPE_CHECKING:
    from logitstore.tokenizer import Tokenizer


def tokenizer_options(*, required: bool) -> Callable[[Command], Command]:
    return option_group(
        click.option(
            "--student-tokenizer",
            multiple=True,
            required=required,
            metavar="TOKENIZER",
            help="Folder or hub id to align with; repeatable.",
        ),
        click.option(
            "--chat-template",
            type=click.Path(exists=True, dir_okay=False),
            help="Jinja file, for tokenizers without one.",
        ),
    )


def read_template(path: str | None) -> str | None:
    """Text of a Jinja file.

    Raises:
        ConfigError: it is not UTF-8.
    """
    from logitstore.errors import ConfigError

    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path}: not UTF-8 at byte {error.start}: save it as UTF-8") from error


def load_students(texts: Iterable[str], template: str | None) -> list[tuple[str, Tokenizer]]:
    """(label, tokenizer) of each.

    Raises:
        ConfigError: two of them have one label.
    """
    from logitstore.errors import ConfigError
    from logitstore.hub import load_tokenizer

    students: dict[str, Tokenizer] = {}
    for text in texts:
        label, tokenizer = label_of(text), load_tokenizer(text, template)
        if students.setdefault(label, tokenizer).fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"--student-tokenizer {text}: another one is called {label!r}, too: rename a folder")
    return list(students.items())


def load_projections(
    signals: Iterable[str], students: list[tuple[str, Tokenizer]], template: str | None
) -> list[tuple[str, Tokenizer]]:
    """(name, tokenizer) of each ``sparse@NAME`` whose name is no student's label."""
    from logitstore.hub import load_tokenizer
    from logitstore.producer.request import projected_name

    labels = {label for label, _ in students}
    names = dict.fromkeys(filter(None, map(projected_name, signals)))
    return [(name, load_tokenizer(name, template)) for name in names if name not in labels]


def label_of(tokenizer: str) -> str:
    """A hub id as it is; of a folder, or a file in one, its name alone: where it lies is nobody's business."""
    path = Path(tokenizer).expanduser().resolve()
    if not path.exists():
        return tokenizer
    return path.parent.name if path.is_file() else path.name
