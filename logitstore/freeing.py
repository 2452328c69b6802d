"""What a garbage collection is about to free: the sentences that it passes before it deletes anything.

``gc/<digest>.json`` says that the part (plan, asset, ...) of that digest is to go, and holds the recipes that referred
to it, so that they can be put back. A collection writes the sentence, deletes the recipes, and only a later one, after
the grace period, deletes the objects and then the sentence. Whoever is about to refer to an object looks for its
sentence after having said so (a heartbeat); the collection looks for heartbeats after having passed sentence. One of
them sees the other.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from logitstore.digests import digest_bytes
from logitstore.errors import FreedError
from logitstore.records import open_record, seal_record
from logitstore.staging import StagedPart
from logitstore.storage import Storage, map_threads

T = TypeVar("T")

FOLDER = "gc"
_WAIT_SECONDS = (0.1, 0.5, 2.0, 5.0)


@dataclass(frozen=True)
class Sentence:
    """An object or part that is to go.

    Attributes:
        target: ``parts/<digest>``, ``plans/<digest>``, ...
        passed: when, seconds since 1970.
        recipes: by name, the records that referred to it, as they were stored.
    """

    target: str
    passed: float
    recipes: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return sentence_path(self.target)

    def to_record(self) -> bytes:
        return seal_record({"target": self.target, "passed": repr(self.passed), "recipes": dict(self.recipes)})

    @classmethod
    def from_record(cls, data: bytes, where: str) -> Sentence:
        body = open_record(data, where)
        return cls(body["target"], float(body["passed"]), body["recipes"])


def sentence_path(target: str) -> str:
    return f"{FOLDER}/{target.rsplit('/', 1)[-1].removesuffix('.json')}.json"


def read_sentences(storage: Storage) -> dict[str, Sentence]:
    """All sentences by target."""

    def read(path: str) -> Sentence | None:
        try:
            return Sentence.from_record(storage.read(path), storage.child_url(path))
        except FileNotFoundError:
            return None  # carried out or lifted since the listing

    found = map_threads(read, sorted(storage.list(FOLDER)))
    return {sentence.target: sentence for sentence in found if sentence is not None}


def pass_sentence(storage: Storage, sentence: Sentence) -> None:
    """Say that an object is to go, and only then delete the recipes that refer to it."""
    storage.write(sentence.path, sentence.to_record())
    for name in sentence.recipes:
        storage.delete(name)


def lift_sentence(storage: Storage, sentence: Sentence) -> None:
    """Let an object stay, since something refers to it; its recipes are put back where nobody answered them since."""
    for name, record in sentence.recipes.items():
        storage.create(name, record.encode())
    storage.delete(sentence.path)


def is_sentenced(storage: Storage, part: str) -> bool:
    return storage.exists(f"{FOLDER}/{part}.json")


def refuse_freed(storage: Storage, parts: Collection[str]) -> None:
    """Make sure that parts are there, and to stay, before a dataset version refers to them.

    Raises:
        FreedError: some are gone or going.
    """

    def is_lost(part: str) -> bool:
        # The sentence first: it is deleted after the seal, so between the two looks nothing can be missed.
        return is_sentenced(storage, part) or not storage.exists(f"parts/{part}/seal.json")

    listed = sorted(parts)
    lost = [part for part, gone in zip(listed, map_threads(is_lost, listed), strict=True) if gone]
    if lost:
        raise FreedError(
            f"{storage.url}: {len(lost)} parts that the dataset is to refer to are missing or being freed by a garbage "
            f"collection, the first is {lost[0]}; run `logitstore gc`, then the same command again"
        )


def tried_again(work: Callable[[], T]) -> T:
    """Do again what ends in a publication when a garbage collection freed what it built on: its answers are gone."""
    for seconds in _WAIT_SECONDS:
        try:
            return work()
        except FreedError:
            time.sleep(seconds)  # until the records that the collection has sentenced are deleted, too
    return work()


def renamed(part: StagedPart) -> StagedPart:
    """The same part under a name of its own: what is uploaded under a name that is being freed would go with it."""
    body = json.loads(part.seal)
    body["nonce"] = uuid.uuid4().hex
    seal = (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
    return replace(part, digest=digest_bytes(seal), seal=seal)
