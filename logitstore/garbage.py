"""``gc``: free what no dataset version, pin or live worker refers to, in two steps that are a grace period apart.

The first collection that finds an object unreachable passes sentence on it and deletes the recipes that lead to it, so
that nobody finds it any more. A later one, once the sentence is older than the grace period, looks again: what is
referred to by now is kept, and its recipes are put back; the rest is deleted. ``freeing`` and ``heartbeats`` say why
nothing that a racing worker comes to refer to is lost; docs/decisions.md has the argument as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from logitstore.errors import StoreError
from logitstore.freeing import Sentence, lift_sentence, pass_sentence
from logitstore.heartbeats import LIVE_SECONDS, repeated
from logitstore.records import seal_record
from logitstore.storage import Storage, map_threads
from logitstore.store import Store
from logitstore.survey import Found, Survey, survey_store

DEFAULT_GRACE_SECONDS = 7 * 86400.0
_LOCK = "collecting.json"


@dataclass
class Collected:
    """What a collection did, or would do. Targets are ``parts/<digest>``, ``plans/<digest>``, and so on.

    Attributes:
        num_kept: objects and parts that something refers to, or that are too young to judge.
        sentenced: found unreachable now; their recipes are deleted.
        waiting: sentenced before, and not yet for the grace period.
        freed: deleted.
        reprieved: sentenced before, and referred to by now.
        num_bytes_sentenced: of parts and objects on which sentence was passed now.
        num_bytes_freed: of those deleted.
        num_swept: expired heartbeats and half-written files.
    """

    num_kept: int = 0
    sentenced: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    reprieved: list[str] = field(default_factory=list)
    num_bytes_sentenced: int = 0
    num_bytes_freed: int = 0
    num_swept: int = 0


def collect(
    store: Store,
    grace_seconds: float = DEFAULT_GRACE_SECONDS,
    *,
    dry_run: bool = False,
    now: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """Free what nothing refers to.

    Args:
        store: the store; workers may go on writing to it.
        grace_seconds: how old an object must be to be judged, and a sentence to be carried out.
        dry_run: change nothing.
        now: seconds since 1970; the present if not given.
        progress: told (targets done, targets in all).

    Raises:
        DamageError: something that refers to objects cannot be read. Nothing was deleted.
        StoreError: another collection is at work.
    """
    now = time.time() if now is None else now
    if dry_run:
        return _Bench(store.storage, survey_store(store, grace_seconds, now), grace_seconds, now, True).judge(progress)
    with _alone(store.storage):
        survey = survey_store(store, grace_seconds, now)
        collected = _Bench(store.storage, survey, grace_seconds, now, False).judge(progress)
        for name in survey.expired:
            store.storage.delete(name)
        collected.num_swept = len(survey.expired) + store.storage.sweep(max(grace_seconds, LIVE_SECONDS))
    return collected


@contextmanager
def _alone(storage: Storage) -> Iterator[None]:
    """One collection at a time: two could undo each other's second look."""
    body = seal_record({"since": repr(time.time())})
    if not storage.create(_LOCK, body):
        entry = storage.entry(_LOCK)
        if entry is not None and (entry.modified is None or time.time() - entry.modified < LIVE_SECONDS):
            raise StoreError(
                f"{storage.child_url(_LOCK)}: another collection is at work; wait for it, or if it was killed "
                f"delete this file ({LIVE_SECONDS / 60:.0f} minutes after its last sign of life it is ignored)"
            )
    with repeated(lambda: storage.write(_LOCK, body)):
        try:
            yield
        finally:
            storage.delete(_LOCK)


@dataclass(frozen=True)
class _Bench:
    """Judges every target of a survey."""

    storage: Storage
    survey: Survey
    grace_seconds: float
    now: float
    dry_run: bool

    def judge(self, progress: Callable[[int, int], None]) -> Collected:
        collected, leading = Collected(), self._leading()
        targets = sorted(self.survey.found.keys() | leading.keys() | self.survey.sentences.keys())
        verdicts = map_threads(lambda target: self._judge(target, leading.get(target, [])), targets)
        for number, (target, verdict) in enumerate(zip(targets, verdicts, strict=True)):
            num_bytes = self.survey.found.get(target, Found()).num_bytes
            if verdict == "kept":
                collected.num_kept += 1
            else:
                getattr(collected, verdict).append(target)
            collected.num_bytes_sentenced += num_bytes if verdict == "sentenced" else 0
            collected.num_bytes_freed += num_bytes if verdict == "freed" else 0
            progress(number + 1, len(targets))
        return collected

    def _leading(self) -> dict[str, list[str]]:
        """By target, the stored records that lead to it. Those that a sentence holds are deleted."""
        leading: dict[str, list[str]] = {}
        for answer in self.survey.answers.values():
            if answer.name in self.survey.ages:
                leading.setdefault(answer.target, []).append(answer.name)
        return leading

    def _judge(self, target: str, records: list[str]) -> str:
        """The verdict, carried out unless this is a dry run: the name of the list of ``Collected`` that it goes to."""
        sentence = self.survey.sentences.get(target)
        is_part = target.startswith("parts/")
        if target in self.survey.reached:
            # A collection that was killed while it deleted a part has begun with the seal: that part is gone.
            if sentence is None or (is_part and not self.storage.exists(f"{target}/seal.json")):
                return "kept" if sentence is None else self._free(sentence)
            if not self.dry_run:
                lift_sentence(self.storage, sentence)
            return "reprieved"
        if sentence is None or records:  # records that were written, or outlived a kill, after the sentence
            if not self.dry_run:
                texts = {**(sentence.recipes if sentence else {}), **self._read(records)}
                pass_sentence(self.storage, Sentence(target, self.now, texts))
            return "sentenced"
        if self.now - sentence.passed < (self.grace_seconds if is_part else max(self.grace_seconds, LIVE_SECONDS)):
            return "waiting"
        return self._free(sentence)

    def _read(self, records: list[str]) -> dict[str, str]:
        texts = {}
        for name in records:
            with suppress(FileNotFoundError):  # dropped since the survey
                texts[name] = self.storage.read(name).decode()
        return texts

    def _free(self, sentence: Sentence) -> str:
        """Delete a target: the seal first, without which a part is not there, and the sentence when all is done."""
        if not self.dry_run:
            if sentence.target.startswith("parts/"):
                self.storage.delete(f"{sentence.target}/seal.json")
                for name in list(self.storage.list(sentence.target)):
                    self.storage.delete(name)
            elif not sentence.target.startswith("recipes/"):
                self.storage.delete(sentence.target)
            self.storage.delete(sentence.path)
        return "freed"
