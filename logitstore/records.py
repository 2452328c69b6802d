"""Small JSON objects (store, recipes, dataset versions) that prove themselves: each holds the digest of the rest."""

from __future__ import annotations

import json
from typing import Any

from logitstore.digests import digest_json
from logitstore.errors import DamageError


def seal_record(body: dict[str, Any]) -> bytes:
    """Readable JSON of ``body`` with its digest added under ``digest``."""
    record = {**body, "digest": digest_json(body)}
    return (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def open_record(data: bytes, where: str) -> dict[str, Any]:
    """The body of a record written by ``seal_record``.

    Raises:
        DamageError: not JSON, or not the JSON that its digest was made of.
    """
    try:
        record = json.loads(data)
        expected = record.pop("digest")
        found = digest_json(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError(f"{where}: not a readable record ({error}); run `logitstore verify`") from error
    if found != expected:
        raise DamageError(f"{where}: digest {expected!s:.16} is stored, {found:.16} computed; run `logitstore verify`")
    return record
