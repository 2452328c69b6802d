"""URLs as messages and records may show them."""

from __future__ import annotations

from urllib.parse import urlsplit

_BUCKETS = {"s3", "s3a", "gs", "gcs", "memory"}
"""Protocols in whose paths ``?`` and ``#`` are letters of a name."""


def public_url(url: str) -> str:
    """``url`` without user, password, query and fragment; local paths and names in buckets as they are."""
    return "::".join(_public_link(link) for link in url.split("::"))  # fsspec chains: cache::s3://...


def _public_link(link: str) -> str:
    if "://" not in link:
        return link
    parts = urlsplit(link)
    if parts.scheme in _BUCKETS:
        host, slash, path = link.split("://", 1)[1].partition("/")
        return f"{parts.scheme}://{host.rpartition('@')[2]}{slash}{path}"
    # Not urlunsplit, which makes memory:///a a relative memory:/a.
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
