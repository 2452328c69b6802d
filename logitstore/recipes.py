"""Recipes: what determines a result, and the answers that were found for them.

A recipe is a JSON object with neither floats nor anything that cannot change the result. Its key is the digest of its
canonical JSON. The answer is created once, under ``recipes/<key>.json``; whoever comes second reads the first one's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logitstore.digests import digest_json
from logitstore.errors import DamageError
from logitstore.records import open_record, seal_record
from logitstore.storage import Storage

Recipe = Mapping[str, Any]

WRITER = uuid.uuid4().hex
"""Names this process in the records it creates, for people; ``text_columns.walk`` takes from it where to begin."""


_ATTEMPTS = 8
"""How often an answer is created that ``gc`` deletes between our being refused and our looking."""


@dataclass(frozen=True)
class Answer:
    """What a recipe gave.

    Attributes:
        result: for parts ``{"part": digest, "content": digest}``; for a plan ``{"plan": digest}``; and so on.
        stats: whole numbers about it (``num_tokens``, ``bytes.sparse``, ...), so that nobody has to open the part.
    """

    result: dict[str, str]
    stats: dict[str, int]

    @property
    def part(self) -> str:
        return self.result["part"]

    @property
    def content(self) -> str:
        return self.result["content"]


def recipe_path(recipe: Recipe) -> str:
    return f"recipes/{digest_json(recipe)}.json"


def find_answer(storage: Storage, recipe: Recipe) -> Answer | None:
    """The answer to a recipe, or None when nobody has given one."""
    path = recipe_path(recipe)
    try:
        data = storage.read(path)
    except FileNotFoundError:
        return None
    record = open_record(data, storage.child_url(path))
    if digest_json(record["recipe"]) != digest_json(recipe):
        raise DamageError(f"{storage.child_url(path)}: answers another recipe than its name; run `logitstore verify`")
    return Answer(record["result"], record["stats"])


def commit_answer(storage: Storage, recipe: Recipe, answer: Answer, provenance: Mapping[str, Any]) -> Answer:
    """Create the answer to a recipe, or return the one that won. Everything it refers to must be stored before."""
    record = {
        "recipe": dict(recipe),
        "result": answer.result,
        "stats": answer.stats,
        "writer": WRITER,
        "provenance": dict(provenance),
    }
    for _ in range(_ATTEMPTS):
        if storage.create(recipe_path(recipe), seal_record(record)):
            return answer
        # Somebody else's, or our own, whose answer was lost: either way the one that everybody finds.
        winner = find_answer(storage, recipe)
        if winner is not None:
            return winner
    raise DamageError(f"{storage.child_url(recipe_path(recipe))}: exists and cannot be read back")
