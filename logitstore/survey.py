"""A survey: what is stored, and which of it something refers to."""

from __future__ import annotations

from dataclasses import dataclass

from logitstore.errors import DamageError
from logitstore.freeing import Sentence, read_sentences
from logitstore.heartbeats import LIVE_SECONDS, read_heartbeats
from logitstore.pins import list_pins
from logitstore.reachable import KNOWN_KINDS, Answered, blocks_of, derived, read_answered, targets_of
from logitstore.storage import Entry, Storage, map_threads
from logitstore.store import Store
from logitstore.versions import list_all, read_version

_COLLECTED = ("parts", "plans", "assets", "manifests", "pages")


@dataclass
class Found:
    """A part's or object's stored bytes and the time of the last write to it."""

    num_bytes: int = 0
    modified: float = 0.0


@dataclass
class Survey:
    """A store as a collection found it.

    Attributes:
        found: by target, what is stored.
        answers: recipes' records by name; those that sentences hold, too.
        ages: by name of a record, when it was written.
        sentences: by target.
        reached: targets and records that must stay.
        expired: heartbeats of workers that are dead.
    """

    found: dict[str, Found]
    answers: dict[str, Answered]
    ages: dict[str, float]
    sentences: dict[str, Sentence]
    reached: set[str]
    expired: list[str]


def survey_store(store: Store, grace_seconds: float, now: float) -> Survey:
    """Everything that is stored, and then what refers to it: whoever refers to something stores it first.

    Args:
        store: the store.
        grace_seconds: parts and records younger than that count as reached; what weighs little needs an hour at least.
        now: seconds since 1970.

    Raises:
        DamageError: something that refers to objects cannot be read.
    """
    storage = store.storage
    sentences = read_sentences(storage)
    found, ages = _list_targets(storage)
    answers = _read_answers(storage, sorted(ages))
    for sentence in sentences.values():
        for name, record in sentence.recipes.items():
            answers.setdefault(name, read_answered(record.encode(), name, storage.child_url(sentence.path)))
    live_seconds = max(grace_seconds, LIVE_SECONDS)
    heartbeats, expired = read_heartbeats(storage, live_seconds, now)
    plans = {heartbeat.plan for heartbeat in heartbeats if heartbeat.plan}
    blocks: set[str] = set().union(*(blocks_of(store.plan(plan)) for plan in plans))
    reached = {f"plans/{plan}" for plan in plans}
    for digest, needed in _rooted_manifests(storage, found, now - live_seconds).items():
        try:
            manifest = store.manifest(digest)
        except DamageError:
            if not needed:
                continue  # nothing names it: what it referred to is not lost with it
            raise
        reached.update(targets_of(digest, manifest))
        blocks.add(manifest.plan.settings.calibration_block)
    youngest = min([now - grace_seconds, *(heartbeat.begun for heartbeat in heartbeats)])
    reached |= _young(found, ages, youngest, min(youngest, now - live_seconds))
    _spread(answers, reached, blocks)
    return Survey(found, answers, ages, sentences, reached, expired)


def _list_targets(storage: Storage) -> tuple[dict[str, Found], dict[str, float]]:
    """Stored targets, and the times of the recipes' records."""
    found: dict[str, Found] = {}
    ages: dict[str, float] = {}
    for entry in storage.list_entries(""):
        folder, _, rest = entry.name.partition("/")
        if folder == "recipes" and entry.name.endswith(".json"):
            ages[entry.name] = _modified(entry)
        elif folder in _COLLECTED and rest:
            target = found.setdefault(f"{folder}/{rest.split('/')[0]}", Found())
            target.num_bytes += entry.num_bytes
            target.modified = max(target.modified, _modified(entry))
    return found, ages


def _modified(entry: Entry) -> float:
    """Where a storage does not say when an object was written, it is taken for new and never judged."""
    return float("inf") if entry.modified is None else entry.modified


def _read_answers(storage: Storage, names: list[str]) -> dict[str, Answered]:
    def read(name: str) -> Answered | None:
        try:
            return read_answered(storage.read(name), name, storage.child_url(name))
        except FileNotFoundError:
            return None  # a repair dropped it since the listing

    return {answer.name: answer for answer in map_threads(read, names) if answer is not None}


def _rooted_manifests(storage: Storage, found: dict[str, Found], youngest: float) -> dict[str, bool]:
    """Digests of the manifests that are roots; whether a version or a pin names them, or a publisher may yet."""
    records = [read_version(storage, name, number) for name, number in list_all(storage)]
    dropped = {record.manifest for record in records if record.dropped}
    roots = {
        digest: False
        for folder, _, digest in (target.partition("/") for target in found)
        if folder == "manifests" and digest not in dropped and found[f"manifests/{digest}"].modified > youngest
    }
    roots |= {record.manifest: True for record in records if not record.dropped}
    return roots | {pin.manifest: True for pin in list_pins(storage)}


def _young(found: dict[str, Found], ages: dict[str, float], youngest: float, youngest_small: float) -> set[str]:
    """What is too young to be judged: its writer may be about to refer to it."""
    young = {name for name, modified in ages.items() if modified > youngest}
    for target, stored in found.items():
        if stored.modified > (youngest if target.startswith("parts/") else youngest_small):
            young.add(target)
    return young


def _spread(answers: dict[str, Answered], reached: set[str], blocks: set[str]) -> None:
    """Add to ``reached`` what live blocks lead to, the records that lead to what is reached, and their assets."""
    reached |= derived(answers.values(), blocks)
    reached.update(answer.name for answer in answers.values() if answer.kind not in KNOWN_KINDS)
    reached.update(answer.target for answer in answers.values() if answer.name in reached)
    reached.update(answer.name for answer in answers.values() if answer.target in reached)
    contents = {answer.content for answer in answers.values() if answer.name in reached}
    for answer in answers.values():
        if answer.kind == "theta" and set(answer.inputs) <= contents:
            reached.add(answer.name)  # settled once: another theta would be another dataset
        if answer.name in reached:
            reached.update(f"assets/{asset}" for asset in answer.assets)
    for answer in answers.values():
        # Kept as long as both tokenizers are; whoever wants them later makes the same again.
        if answer.kind == "vocabulary_maps" and all(f"assets/{tokenizer}" in reached for tokenizer in answer.inputs):
            reached.update((answer.name, answer.target))
