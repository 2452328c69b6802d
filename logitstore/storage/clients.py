"""File systems of fsspec, set up so that they neither try again by themselves nor wait for ever.

Two layers of retries multiply: five attempts of a client in each of ours hide for minutes what is wrong, and hammer a
bucket that asked for less. What a user configured for fsspec (``~/.config/fsspec``, ``FSSPEC_S3_...``) holds otherwise.
"""

from __future__ import annotations

from types import MethodType
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs

MAX_CONNECTIONS = 64


def open_file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path on it.

    Raises:
        ImportError: its package is not installed.
        ValueError: the protocol is unknown.
    """
    match "" if "::" in url else urlsplit(url).scheme:
        case "s3" | "s3a":
            fs, root = url_to_fs(url, **_s3_options())
        case "gs" | "gcs":
            fs, root = _open_gcs(url)
        case _:
            fs, root = url_to_fs(url)
    return _one_attempt_each(fs), root


def reopen(fs: fsspec.AbstractFileSystem) -> fsspec.AbstractFileSystem:
    """The same file system with connections of its own, for a process that was forked."""
    return _one_attempt_each(type(fs)(*fs.storage_args, **fs.storage_options))


def _one_attempt_each(fs: fsspec.AbstractFileSystem) -> fsspec.AbstractFileSystem:
    if "s3" in fs.protocol:
        fs.retries = 1
    elif "gs" in fs.protocol and hasattr(type(fs)._request, "__wrapped__"):
        # gcsfs has no option for its six attempts: they are a decorator, so take what it decorates.
        fs._request = MethodType(type(fs)._request.__wrapped__, fs)
    return fs


def _configured(*protocols: str) -> dict[str, Any]:
    return {name: value for each in protocols for name, value in fsspec.config.conf.get(each, {}).items()}


def _s3_options() -> dict[str, Any]:
    configured = _configured("s3", "s3a").get("config_kwargs", {})
    once = {"max_pool_connections": MAX_CONNECTIONS, **configured, "retries": {"total_max_attempts": 1}}
    # With more than one, s3fs asks for the size before each read of a whole object.
    return {"config_kwargs": once, "max_concurrency": 1, "use_listings_cache": False}


def _open_gcs(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    from aiohttp import ClientTimeout
    from gcsfs.core import GCSFileSystem  # not gcsfs's own choice, which asks a gRPC service about the bucket first

    # md5: the bucket's answer to a write names what it stored, and must name what was sent.
    ours = {
        "requests_timeout": ClientTimeout(total=None, sock_connect=10, sock_read=30),
        "consistency": "md5",
        "use_listings_cache": False,
    }
    return GCSFileSystem(**{**ours, **_configured("gcs", "gs")}), GCSFileSystem._strip_protocol(url)
