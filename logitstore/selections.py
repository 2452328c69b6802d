"""What the recipe of a sparse signal says of its selection, for whoever reads one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NUMBER_OF = {"topk": "k", "topp": "p", "sample": "n", "threshold": "theta", "given": "digest"}


def selection_name(selection: Mapping[str, Any]) -> str:
    """As people call it: ``topk:64``, ``threshold:0.0043``, ``topk:8+sample:50``; given ids by their digest."""
    return "+".join(_part_name(part) for part in _parts(selection))


def policy_names(selection: Mapping[str, Any]) -> str:
    """The same without numbers: ``topk``, ``topk+sample``."""
    return "+".join(part["policy"] for part in _parts(selection))


def is_sampled(selection: Mapping[str, Any]) -> bool:
    """Whether entries are drawn, so that rows are weights and no partition."""
    return any("seed" in part for part in _parts(selection))


def _parts(selection: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return selection["of"] if selection["policy"] == "union" else [selection]


def _part_name(part: Mapping[str, Any]) -> str:
    name, number = part["policy"], part[_NUMBER_OF[part["policy"]]]
    if name == "topp":
        return f"topp:{number},max={part['max']}"
    return f"{name}:{number[:16]}" if name == "given" else f"{name}:{number}"
