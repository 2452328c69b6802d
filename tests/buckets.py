"""Servers to test against: moto's S3 and a stub of GCS, each behind a ``FaultProxy``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fault_proxy import FaultProxy
from gcs_stub import GcsStub

TEST_READ_SECONDS = 1.0
"""After so long a silence a client in the tests takes an answer for lost."""


@contextmanager
def faulty_s3() -> Iterator[FaultProxy]:
    """A proxy before a server with a bucket called ``bucket``; ``s3://bucket`` goes through it meanwhile.

    Skips the test where moto or s3fs is not installed.
    """
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with FaultProxy(host, port) as proxy, configured("s3", s3_options(proxy.url)) as options:
        fsspec.filesystem("s3", **options).makedirs("bucket", exist_ok=True)  # moto keeps buckets from server to server
        try:
            yield proxy
        finally:
            server.stop()


@contextmanager
def faulty_gcs() -> Iterator[FaultProxy]:
    """A proxy before a stub of Google Cloud Storage; ``gs://...`` goes through it meanwhile. Skips without gcsfs."""
    pytest.importorskip("gcsfs")
    with GcsStub() as stub, FaultProxy("127.0.0.1", stub.port) as proxy:
        options = {"endpoint_url": proxy.url, "token": "anon", "project": "test", "requests_timeout": TEST_READ_SECONDS}
        with configured("gcs", options):
            yield proxy


def s3_options(endpoint_url: str) -> dict[str, Any]:
    quick = {"read_timeout": TEST_READ_SECONDS, "connect_timeout": TEST_READ_SECONDS}
    return {"endpoint_url": endpoint_url, "key": "test", "secret": "very-secret", "config_kwargs": quick}


@contextmanager
def configured(protocol: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """fsspec set up for a protocol, in this process and in those that it starts."""
    variable = f"FSSPEC_{protocol.upper()}"
    fsspec.config.conf[protocol], os.environ[variable] = options, json.dumps(options)
    try:
        yield options
    finally:
        del fsspec.config.conf[protocol], os.environ[variable]


def new_url(bucket: str = "s3://bucket") -> str:
    return f"{bucket}/{uuid4().hex}/store"
