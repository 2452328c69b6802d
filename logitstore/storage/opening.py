"""From a path or URL to its storage."""

from __future__ import annotations

from urllib.parse import urlsplit

from logitstore.errors import StorageError
from logitstore.storage.clients import open_file_system
from logitstore.storage.interface import Storage
from logitstore.storage.local import LocalStorage
from logitstore.storage.remote import RemoteStorage
from logitstore.urls import public_url


def open_storage(url: str) -> Storage:
    """The storage behind a local path or an fsspec URL.

    Raises:
        StorageError: the URL's protocol is unknown or its package is not installed.
    """
    protocol = urlsplit(url).scheme if "://" in url else "file"
    if protocol in {"file", "local"}:
        return LocalStorage(url.split("://", 1)[-1])
    try:
        fs, root = open_file_system(url)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{public_url(url)}: cannot open this kind of URL: {error}") from error
    return RemoteStorage(url, fs, root)
