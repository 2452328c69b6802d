"""S3 objects by obstore: a third to half less CPU time than s3fs takes, its buffers handed on without a copy.

It is tried once and only for reading. Whatever it cannot do, s3fs does after it, with all its retries and messages; so
nothing depends on it but speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import fsspec
from fsspec.asyn import sync

FastReader = Callable[[str, int, int | None], memoryview]
"""Of (path, begin, end): the bytes between, or with None for the end all that there are."""

_KNOWN_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
_CREDENTIALS_SECONDS = 300.0


def open_fast_reader(fs: fsspec.AbstractFileSystem, root: str, timeout_seconds: float) -> FastReader | None:
    """A reader of paths on ``fs``, or None where obstore is missing or would not do as ``fs`` does.

    Args:
        fs: where credentials and endpoint are taken from.
        root: a path whose first segment is the bucket.
        timeout_seconds: after which an attempt fails.
    """
    if "s3" not in fs.protocol or not _is_plain(fs):
        return None
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return None
    bucket = root.split("/", 1)[0]
    store = S3Store(
        bucket,
        **_access(fs),
        client_options={
            "allow_http": True,
            "timeout": timedelta(seconds=timeout_seconds),
            "read_timeout": timedelta(seconds=fs.config_kwargs.get("read_timeout", fs.read_timeout)),
            "connect_timeout": timedelta(seconds=fs.config_kwargs.get("connect_timeout", fs.connect_timeout)),
        },
        retry_config={"max_retries": 0},
    )

    def read(path: str, begin: int, end: int | None) -> memoryview:
        key = path[len(bucket) + 1 :]
        if end is None:
            return memoryview(obstore.get(store, key).bytes())[begin:]
        return memoryview(obstore.get_range(store, key, start=begin, end=end))

    return read


def _is_plain(fs: Any) -> bool:
    """Whether nothing is configured that obstore would not know of."""
    known = set(fs.client_kwargs) <= _KNOWN_CLIENT_OPTIONS and "proxies" not in fs.config_kwargs
    return known and not (fs.req_kw or fs.s3_additional_kwargs or fs.version_aware)


def _access(fs: Any) -> dict[str, Any]:
    client = sync(fs.loop, fs.set_session)
    endpoint = fs.endpoint_url or fs.client_kwargs.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3")
    access: dict[str, Any] = {"region": client.meta.region_name or "us-east-1"}
    if endpoint:
        access["endpoint"] = endpoint
    if fs.anon:
        return {**access, "skip_signature": True}
    if fs.key and fs.secret:
        token = {"session_token": fs.token} if fs.token else {}
        return {**access, "access_key_id": fs.key, "secret_access_key": fs.secret, **token}
    return {**access, "credential_provider": lambda: _credentials(fs)}


def _credentials(fs: Any) -> dict[str, Any]:
    """What s3fs signs with at this moment, wherever botocore found it: files, roles, sign-on."""

    async def ask() -> Any:
        return await (await fs.session.get_credentials()).get_frozen_credentials()

    frozen = sync(fs.loop, ask)
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.fromtimestamp(time.time() + _CREDENTIALS_SECONDS, UTC),
    }
