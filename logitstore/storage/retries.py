"""Trying again: the one layer that does, with full jitter, for minutes. Client libraries are told not to.

Thousands of workers that were refused together must not come back together: each pause is uniform between nothing and
a bound that doubles.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from logitstore.errors import StorageError
from logitstore.storage.answers import NO_ROOM, is_final

T = TypeVar("T")

RETRY_SECONDS = 180.0
"""How long after its first failure a request is tried again, before it is an error."""

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 20.0
"""Seconds: the bound of the first pause, and of the longest."""

_CREDENTIALS = re.compile(r"//[^/\s@]*@")


def retry(where: str, request: Callable[[], T]) -> T:
    """What ``request`` gives, once it gives anything.

    Args:
        where: the URL, for messages; without credentials.
        request: one attempt. FileNotFoundError and FileExistsError are answers and pass.

    Raises:
        StorageError: asking again cannot help, or did not help for ``RETRY_SECONDS``.
    """
    deadline, delay = None, FIRST_PAUSE
    while True:
        try:
            return request()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if is_final(error):
                raise storage_error(f"{where}: refused", error) from error
            now = time.monotonic()
            deadline = deadline or now + RETRY_SECONDS
            if now + delay > deadline:
                raise storage_error(f"{where}: gave up after {RETRY_SECONDS:.0f} s", error) from error
        time.sleep(random.uniform(0, delay))
        delay = min(delay * 2, LONGEST_PAUSE)


def storage_error(where: str, error: Any) -> StorageError:
    """``error`` in one line, for whoever reads it."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return StorageError(f"{where}: no space left; free some and run the same command again, nothing is lost")
    said = _CREDENTIALS.sub("//", " ".join(str(error).split()))  # clients quote the URLs that they were given
    return StorageError(f"{where}: {said or type(error).__name__}")
