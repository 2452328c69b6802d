"""Which files a corpus is made of: paths, globs, folders and URLs turned into one sorted list of files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec

from logitstore.errors import CorpusError
from logitstore.urls import public_url

LINE_EXTENSIONS = frozenset({"jsonl", "ndjson", "json"})
PARQUET_EXTENSIONS = frozenset({"parquet", "pq"})
ARROW_EXTENSIONS = frozenset({"arrow", "ipc", "feather", "arrows"})
COMPRESSIONS = frozenset({"gz", "bz2", "xz", "zst", "zip"})

# Only a folder asks which extensions are text: a file that is named, or matched by a glob, is read as text unless its
# extension says otherwise.
_PROSE = "txt text md markdown rst adoc org tex html htm xml po log ipynb"
_CODE = (
    "py pyi c h cc cpp hpp cu rs go java kt scala swift js jsx ts tsx rb php pl lua r jl hs ml ex cs sql sh css proto"
)
_SETTINGS = "yaml yml toml ini cfg cmake"
TEXT_EXTENSIONS = frozenset(f"{_PROSE} {_CODE} {_SETTINGS}".split())

# What file systems call a version of a file, the most telling first.
_VERSION_NAMES = ("ETag", "etag", "blob_id", "CRC", "LastModified", "last_modified", "mtime", "created")


@dataclass(frozen=True)
class CorpusFile:
    """One input file."""

    url: str
    """Absolute local path, or fsspec URL."""
    size: int
    """Bytes as stored, before decompression; -1 if the file system does not tell."""
    version: str
    """Changes when the file does: size and modification time if local, else the backend's ETag or the like."""

    @property
    def source(self) -> str:
        """The URL without credentials and query: what documents and messages name."""
        return public_url(self.url)

    @property
    def extension(self) -> str:
        """Lower-case extension inside any compression suffix: ``jsonl`` for ``a.JSONL.gz``."""
        links = self.source.split("::")
        return _extension(next((link for link in links if "://" in link), links[0]))


def list_files(patterns: Sequence[str]) -> list[CorpusFile]:
    """Files named by ``patterns``, sorted by URL, each once.

    Args:
        patterns: paths, globs (``data/**/*.jsonl``), folders (all supported files below, hidden ones left out), or the
            same on any fsspec file system (``s3://``, ``hf://``, ``memory://``, ...).

    Raises:
        CorpusError: a pattern matches nothing, or its file system refuses or is not installed.
    """
    files: dict[str, CorpusFile] = {}
    for pattern in patterns:
        found = list(_expand(pattern))
        if not found:
            raise CorpusError(f"{public_url(pattern)}: no such file, and no file that matches: check the path or glob")
        files.update((file.url, file) for file in found)
    return [files[url] for url in sorted(files)]


def _expand(pattern: str) -> Iterator[CorpusFile]:
    """Files of one pattern. A name that exists is taken as it is, even if it holds glob characters."""
    try:
        fs, path = fsspec.core.url_to_fs(pattern)
        try:
            info = fs.info(path)
        except FileNotFoundError:
            yield from _expand_glob(fs, path, pattern)
            return
        if info["type"] == "directory":
            for name, below in sorted(fs.find(path, detail=True).items()):
                if _is_supported(name, path):
                    yield _describe(fs, name, below, _url_of(fs, name, pattern))
        else:
            # Some file systems drop the host and user of a URL from their paths (ftp://, sftp://): keep the URL then.
            url = pattern if type(fs)._get_kwargs_from_urls(pattern) else _url_of(fs, path, pattern)
            yield _describe(fs, path, info, url)
    except Exception as error:
        # Remote file systems raise whatever their client libraries do (botocore's errors are not even OSErrors).
        raise CorpusError(f"{public_url(pattern)}: cannot be listed: {_one_line(error)}") from error


def _expand_glob(fs: Any, path: str, pattern: str) -> Iterator[CorpusFile]:
    if not any(character in path for character in "*?["):
        return
    for name, info in sorted(fs.glob(path, detail=True).items()):
        if info["type"] != "directory":
            yield _describe(fs, name, info, _url_of(fs, name, pattern))


def _url_of(fs: Any, path: str, pattern: str) -> str:
    if _is_local(fs):
        return path
    head, chained, rest = pattern.partition("::")
    if chained and "://" not in head:  # a cache in front of another file system
        return f"{head}::{_url_of(fs.fs, path, rest)}"
    return fs.unstrip_protocol(path) + chained + rest


def _is_local(fs: Any) -> bool:
    return isinstance(fs, fsspec.implementations.local.LocalFileSystem)


def _is_supported(name: str, folder: str) -> bool:
    below = name[len(folder) :].strip("/")
    if any(part.startswith(".") for part in below.split("/")):
        return False
    return _extension(name) in LINE_EXTENSIONS | PARQUET_EXTENSIONS | ARROW_EXTENSIONS | TEXT_EXTENSIONS


def _extension(path: str) -> str:
    stem, extension = os.path.splitext(path)
    if extension[1:].lower() in COMPRESSIONS:
        stem, extension = os.path.splitext(stem)
    return extension[1:].lower()


def _describe(fs: Any, path: str, info: dict[str, Any], url: str) -> CorpusFile:
    size = info.get("size")
    size = -1 if size is None else int(size)
    return CorpusFile(url=url, size=size, version=f"{size}-{_version(fs, path, info)}".replace('"', ""))


def _version(fs: Any, path: str, info: dict[str, Any]) -> Any:
    if _is_local(fs):
        return os.stat(path).st_mtime_ns
    # Not fs.ukey(): for archives it differs from one run to the next.
    version = next((info[name] for name in _VERSION_NAMES if info.get(name)), "")
    return version.timestamp() if isinstance(version, datetime) else version


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
