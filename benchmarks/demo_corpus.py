"""Real text that every Python ships: docstrings of the standard library and the language reference in ``pydoc_data``.

Nothing is imported: modules are parsed with ``ast``. The order is that of the paths. A long text is cut at its
paragraphs.
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = frozenset({
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
})  # fmt: skip
_LONGEST, _SHORTEST = 640, 64
"""Characters of a document: short ones keep packed sequences of a few hundred tokens full."""


def documents() -> Iterator[dict[str, str]]:
    """Rows ``{"text", "source"}``: the language reference by topic, then docstrings by module."""
    for source, text in [*_topics(), *_docstrings(Path(sysconfig.get_paths()["stdlib"]))]:
        if _SHORTEST <= len(text) <= 2 * _LONGEST and _is_utf8(text):
            yield {"text": text, "source": source}


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics):
        # Topics quote one another; a paragraph that stands twice could be on both sides of the held-out split.
        paragraphs = [p.rstrip() for p in re.split(r"\n\s*\n", topics[name].strip("\n")) if p.strip() and p not in seen]
        seen.update(paragraphs)
        for piece in _pieces(paragraphs):
            yield f"topics/{name}", piece


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.intersection(relative.parts) or any(part.startswith("config-") for part in relative.parts):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node, clean=False)
            if text:
                name = f"{module}.{node.name}" if not isinstance(node, ast.Module) else module
                for piece in _pieces(re.split(r"\n\s*\n", inspect.cleandoc(text.expandtabs()))):
                    yield f"docstrings/{relative.as_posix()}", f"{name}\n\n{piece}"


def _pieces(paragraphs: list[str]) -> Iterator[str]:
    """Neighbouring paragraphs together, up to the longest size."""
    held = ""
    for paragraph in paragraphs:
        if held and len(held) + len(paragraph) > _LONGEST:
            yield held
            held = ""
        held = f"{held}\n\n{paragraph}" if held else paragraph
    if held:
        yield held


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
