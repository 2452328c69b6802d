"""What an error of a client library means: each library wraps a server's answer in its own way."""

from __future__ import annotations

import errno
from typing import Any

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_FINAL_OS_ERRORS = (PermissionError, IsADirectoryError, NotADirectoryError)
_MISUSE = (NotImplementedError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)

_PASSING_STATUSES = {408, 409, 425, 429}
_PASSING_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown"}
"""Client errors (4xx) that speak of the moment or the transfer, not of the request."""


def is_final(error: Exception) -> bool:
    """Whether asking again cannot help. Client libraries raise more than OSErrors for a network that stumbles."""
    status = http_status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _PASSING_STATUSES and _s3_code(error) not in _PASSING_CODES
    if isinstance(error, OSError):
        return isinstance(error, _FINAL_OS_ERRORS) or error.errno in NO_ROOM
    return isinstance(error, _MISUSE) or "Credential" in type(error).__name__


def http_status(error: BaseException | None) -> int | None:
    """The status of the HTTP answer that an error of s3fs, gcsfs or aiohttp stands for, if it stands for one."""
    found: Any = _s3_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if found is None:
        found = getattr(error, "code", None) or getattr(error, "status", None)
    if found is None and type(error) is OSError and str(error).startswith("Forbidden:"):
        found = 403  # gcsfs
    return int(found) if str(found).isdecimal() else None


def _s3_code(error: BaseException) -> str:
    return _s3_response(error).get("Error", {}).get("Code", "")


def _s3_response(error: BaseException | None) -> dict[str, Any]:
    # s3fs raises an OSError from botocore's ClientError, which holds the answer.
    for each in (error, getattr(error, "__cause__", None)):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return response
    return {}
