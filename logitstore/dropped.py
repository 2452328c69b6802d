"""Parts whose answers a repair has dropped: what manifests say of them is no longer to be believed.

A producer takes what is answered from the newest manifest, since asking for each recipe of 100,000 blocks would take
minutes. ``dropped/<part>`` says for which of those it must ask after all. The folder holds as many marks as there were
damaged parts, so it is cheap to list.
"""

from __future__ import annotations

from logitstore.storage import Storage

_FOLDER = "dropped"


def mark_dropped(storage: Storage, part: str) -> None:
    """Say that the answer of a part is about to be dropped; call this before the recipe's record is deleted."""
    storage.write(f"{_FOLDER}/{part}", b"")


def dropped_parts(storage: Storage) -> set[str]:
    """Digests of all parts whose answers were ever dropped."""
    return {name.rsplit("/", 1)[-1] for name in storage.list(_FOLDER)}
