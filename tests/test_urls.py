"""URLs in messages and records: what locates, and nothing that opens."""

from __future__ import annotations

import pytest

from logitstore.storage import open_storage
from logitstore.urls import public_url


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("/a/b@c?d", "/a/b@c?d"),
        ("/data/a?b#c@d.txt", "/data/a?b#c@d.txt"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("s3://key:secret@bucket/a#b?c@d", "s3://bucket/a#b?c@d"),
        ("memory:///a/b", "memory:///a/b"),
        ("https://user@host:8080/a?token=secret#part", "https://host:8080/a"),
        ("sftp://user:p@ss@host/a", "sftp://host/a"),
        ("hf://datasets/org/name@main/a.parquet", "hf://datasets/org/name@main/a.parquet"),
        ("simplecache::s3://key:secret@bucket/a", "simplecache::s3://bucket/a"),
        ("zip://x::https://u:secret@host/a.zip?sig=secret", "zip://x::https://host/a.zip"),
    ],
)
def test_public_url_holds_no_credentials(url, public):
    assert public_url(url) == public


def test_child_url_of_a_store_without_a_host_is_a_url():
    assert open_storage("memory:///store").child_url("parts/a") == "memory:///store/parts/a"
