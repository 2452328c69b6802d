"""Readers of the made-up store that ``bench_read`` measures: each prepares, and returns the work that counts."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BUCKET = "bench-read"
DATASET = "read"
RANGE_BYTES = 8 << 20
THREADS = 4
READ_BYTES = 128 << 20
MAX_TIMES = 16
"""The store is read again until it was so much: what a process pays once is not to be divided by little."""

FIRST_ARRAYS = (("tokens", "documents"), ("sparse", "rest"))
"""What a first batch needs, by column: tokens, and the sparse signal."""

Client = Callable[[], Callable[[], int]]
"""Prepares; what it returns does the work and says how many stored bytes that took."""


def clients() -> dict[str, Client]:
    """By name; those whose library is missing are left out."""
    found = {
        "bytes: s3fs, whole objects, unchecked": bytes_s3fs,
        "bytes: obstore, 8 MiB ranges, unchecked": bytes_obstore,
        "bytes: logitstore over s3fs, BLAKE3 of every byte": without_obstore(bytes_ours),
        "bytes: logitstore over obstore, BLAKE3 of every byte": bytes_ours,
        "dense: zarr + s3fs": dense_zarr,
        "dense: logitstore over s3fs, checked": without_obstore(dense_ours),
        "dense: logitstore over obstore, checked": dense_ours,
        "first: zarr + s3fs": first_zarr,
        "first: logitstore over s3fs, checked": without_obstore(first_ours),
        "first: logitstore over obstore, checked": first_ours,
    }
    has_obstore = importlib.util.find_spec("obstore") is not None
    return {name: client for name, client in found.items() if has_obstore or "obstore" not in name}


def without_obstore(client: Client) -> Client:
    def prepare() -> Callable[[], int]:
        sys.modules["obstore"] = None  # type: ignore[assignment]  # so that importing it fails
        return client()

    return prepare


def run_client(name: str) -> dict[str, float]:
    work = clients()[name]()
    began, used = time.perf_counter(), cpu_seconds()
    num_bytes = work()
    return {"wall": time.perf_counter() - began, "cpu": cpu_seconds() - used, "bytes": num_bytes}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def in_threads(function: Callable[[Any], int], items: list[Any], num_bytes: int) -> Callable[[], int]:
    """``function`` on all items, which are of ``num_bytes``, again and again; the last was done once before."""
    function(items[-1])
    items = items * min(MAX_TIMES, max(1, round(READ_BYTES / num_bytes)))

    def work() -> int:
        with ThreadPoolExecutor(THREADS) as pool:
            return sum(pool.map(function, items))

    return work


def bytes_s3fs() -> Callable[[], int]:
    import s3fs

    objects = data_objects(open_store())
    fs = s3fs.S3FileSystem(**json.loads(os.environ["FSSPEC_S3"]))
    return in_threads(lambda o: len(fs.cat_file(f"{BUCKET}/store/{o[0]}")), objects, total(objects))


def bytes_obstore() -> Callable[[], int]:
    import obstore
    from obstore.store import S3Store

    objects = data_objects(open_store())
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    bucket = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True}, virtual_hosted_style_request=False)
    ranges = [
        (path, begin, min(begin + RANGE_BYTES, size))
        for path, _, size, _ in objects
        for begin in range(0, size, RANGE_BYTES)
    ]

    def read(item: tuple[str, int, int]) -> int:
        path, begin, end = item
        return len(memoryview(obstore.get_range(bucket, f"store/{path}", start=begin, end=end)))

    return in_threads(read, ranges, total(objects))


def bytes_ours() -> Callable[[], int]:
    from logitstore.reading import read_object

    store = open_store()
    objects = data_objects(store)
    return in_threads(lambda o: len(read_object(store.storage, o[0], o[2], o[3])), objects, total(objects))


def dense_parts(store: Any) -> list[tuple[Any, str, int]]:
    """(part, array, stored bytes) of the dense arrays in zarr's own codecs."""
    found = []
    for column in store.dataset(DATASET).manifest.columns:
        for block in range(len(column.cells)):
            part = store.column_part(column, block)
            for name in {"tokens", "documents", "scored"} & set(part.index):
                found.append((part, name, sum(o.num_bytes for o in part.index[name].objects)))
    return found


def dense_zarr() -> Callable[[], int]:
    import zarr

    parts = dense_parts(open_store())
    options = json.loads(os.environ["FSSPEC_S3"])

    def read(item: tuple[Any, str, int]) -> int:
        part, name, size = item
        group = zarr.open_group(f"s3://{BUCKET}/store/{part.path}", mode="r", storage_options=options)
        group[name][...]
        return size

    return in_threads(read, parts, total(parts))


def dense_ours() -> Callable[[], int]:
    parts = dense_parts(open_store())

    def read(item: tuple[Any, str, int]) -> int:
        part, name, size = item
        part.array(name)
        return size

    return in_threads(read, parts, total(parts))


def warm_up() -> None:
    """Compile what is compiled once for a process, which no reader is to be charged with."""
    from logitstore.parts import Part
    from logitstore.signals import read_sparse
    from logitstore.staging import upload
    from logitstore.storage import open_storage

    storage = open_storage("memory://warm-up")
    for staged in list(made_up_parts(0, 100))[1:2]:
        upload(storage, staged)
        read_sparse(Part(storage, staged.digest))
    open_store()


def first_zarr() -> Callable[[], int]:
    import zarr

    import logitstore.codecs.sparse_rows  # noqa: F401  (registers the codec)

    warm_up()
    store = open_store()
    columns = store.dataset(DATASET).manifest.columns
    options = json.loads(os.environ["FSSPEC_S3"])

    def work() -> int:
        for column, names in zip(columns, FIRST_ARRAYS, strict=False):
            url = f"s3://{BUCKET}/store/parts/{column.cells[0].part}"
            group = zarr.open_group(url, mode="r", storage_options=options)
            for name in names:
                group[name][...]
        return 0

    return work


def first_ours() -> Callable[[], int]:
    from logitstore.signals import read_sparse
    from logitstore.token_parts import read_tokens

    warm_up()

    def work() -> int:
        store = open_store()
        version = store.dataset(DATASET)
        tokens, sparse = version.manifest.columns[:2]
        read_tokens(store.column_part(tokens, 0))
        read_sparse(store.column_part(sparse, 0))
        return 0

    return work


def total(described: list[Any]) -> int:
    """Stored bytes, the third of what is said of each object or array."""
    return sum(item[2] for item in described)


def open_store() -> Any:
    from logitstore.store import Store

    return Store.open(f"s3://{BUCKET}/store")


def data_objects(store: Any) -> list[tuple[str, str, int, str]]:
    """(path, array, bytes, digest) of every object of every array."""
    found = []
    for column in store.dataset(DATASET).manifest.columns:
        for block in range(len(column.cells)):
            part = store.column_part(column, block)
            for name, array in part.index.items():
                found += [(f"{part.path}/{name}/{o.key}", name, o.num_bytes, o.digest) for o in array.objects]
    return found


def made_up_parts(seed: int, num_tokens: int) -> Iterator[Any]:
    """Tokens, sparse rows of 12 entries on average, scalars; the entropy of real ones, roughly."""
    from logitstore.signals import SparseSignal, scalar_columns, stage_scalars, stage_sparse
    from logitstore.sparse import SparseRows, offsets_of, quantise
    from logitstore.staging import ArrayToStore, stage

    rng = np.random.default_rng(seed)
    ids = (32_000 * rng.random(num_tokens) ** 3).astype(np.int32)
    tokens = np.stack([ids, rng.poisson(4, num_tokens)], axis=1).astype(np.int32)
    documents = np.array([[num_tokens, 1]], np.int64)
    yield stage("tokens", {"tokens": ArrayToStore(tokens), "documents": ArrayToStore(documents)}, {})
    counts = 1 + rng.poisson(11, num_tokens)
    offsets = offsets_of(counts)
    starts = np.repeat(offsets[:-1], counts)
    places = np.arange(offsets[-1]) - starts
    logprobs = -0.3 - 0.6 * places - rng.random(offsets[-1])
    quanta = quantise(np.where(places == 0, logprobs, np.minimum(logprobs, -0.3 - 0.6 * places)))
    spread = (np.repeat(ids, counts) + 7 * places + (rng.random(offsets[-1]) * 7).astype(np.int32)) % 32_000
    order = np.lexsort((spread, quanta, places > 0, np.repeat(np.arange(num_tokens), counts)))
    rows = SparseRows(offsets, spread[order].astype(np.int32), quanta[order], np.zeros(offsets[-1], np.uint16))
    rest = rng.normal(-3, 1, (num_tokens, 1)).astype(np.float32)
    yield stage_sparse(SparseSignal(rows, rest, (1.0,), None))
    values = np.abs(rng.normal(2, 1, (num_tokens, len(scalar_columns((1.0,))))))
    whole = [name in ("rank", "argmax_id") for name in scalar_columns((1.0,))]
    values[:, whole] = np.rint(values[:, whole] * 10)
    yield stage_scalars(values.astype(np.float32), np.ones(num_tokens, bool), (1.0,))
