"""Signs of life: who is at work on a store, so that a garbage collection keeps what they build on.

A worker writes ``heartbeats/<writer>.json`` before it looks for anything, again every minute, and deletes it when it is
done. While it is fresh, nothing that was stored since the worker began is collected, nor anything that can be derived
from the blocks of its plan. Correctness never depends on a beat arriving in time: publishing checks every new part.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from logitstore.errors import StorageError
from logitstore.recipes import WRITER
from logitstore.records import open_record, seal_record
from logitstore.storage import Storage

FOLDER = "heartbeats"
BEAT_SECONDS = 60.0
LIVE_SECONDS = 3600.0
"""A worker that was silent for longer is taken for dead, if the grace period is not longer still."""


@dataclass(frozen=True)
class Heartbeat:
    """A worker's sign of life.

    Attributes:
        plan: digest of the plan that it works on; empty while it has none.
        begun: when the worker began, seconds since 1970 by the storage's clock.
    """

    plan: str
    begun: float


@contextmanager
def alive(storage: Storage, plan: str = "") -> Iterator[None]:
    """Keep a sign of life on a store while the body runs."""
    name = f"{FOLDER}/{WRITER}-{uuid.uuid4().hex[:8]}.json"
    _write(storage, name, Heartbeat(plan, time.time()))
    entry = storage.entry(name)
    # Ages are told by the storage's clock, which need not be ours and may count whole seconds.
    begun = entry.modified - 1 if entry is not None and entry.modified is not None else time.time()
    with repeated(lambda: _write(storage, name, Heartbeat(plan, begun))):
        try:
            yield
        finally:
            with suppress(StorageError):  # it expires by itself, and must not hide how the body ended
                storage.delete(name)


@contextmanager
def repeated(beat: Callable[[], None]) -> Iterator[None]:
    """Call ``beat`` now and every minute while the body runs, never after it has ended."""
    stopped, beating = threading.Event(), threading.Lock()

    def run() -> None:
        while not stopped.wait(BEAT_SECONDS):
            with beating, suppress(StorageError):  # the next one may get through
                if not stopped.is_set():
                    beat()

    beat()
    threading.Thread(target=run, name="logitstore heartbeat", daemon=True).start()
    try:
        yield
    finally:
        with beating:
            stopped.set()


def read_heartbeats(storage: Storage, live_seconds: float, now: float) -> tuple[list[Heartbeat], list[str]]:
    """Those that are fresh, and the names of those that have expired.

    Raises:
        DamageError: a fresh one cannot be read, so that nobody knows what it stands for.
    """
    live, expired = [], []
    for entry in storage.list_entries(FOLDER):
        if entry.modified is not None and now - entry.modified > live_seconds:
            expired.append(entry.name)
            continue
        with suppress(FileNotFoundError):  # done since the listing
            body = open_record(storage.read(entry.name), storage.child_url(entry.name))
            live.append(Heartbeat(body["plan"], float(body["begun"])))
    return live, expired


def _write(storage: Storage, name: str, heartbeat: Heartbeat) -> None:
    storage.write(name, seal_record({"plan": heartbeat.plan, "begun": repr(heartbeat.begun), "writer": WRITER}))
