"""Objects in ranges, and dense arrays without zarr: the same values, or an error that names the object."""

from __future__ import annotations

import json
from uuid import uuid4

import numpy as np
import pytest
import zarr
from counting import CountingStorage
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from logitstore import dense_arrays, reading
from logitstore.dense_arrays import decode_dense
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError
from logitstore.parts import Part
from logitstore.reading import check_end, read_object
from logitstore.staging import ArrayToStore, stage, upload
from logitstore.storage import open_storage

DATA = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))


@pytest.fixture(params=["folder", "memory"])
def storage(request, tmp_path):
    url = str(tmp_path) if request.param == "folder" else f"memory://{uuid4().hex}"
    storage = CountingStorage(open_storage(url))
    storage.write("x", DATA)
    storage.requests.clear()
    return storage


# Ranges


@pytest.mark.parametrize(("range_bytes", "requests"), [(1000, 1), (999, 2), (300, 4), (1, 1000)])
def test_objects_are_read_in_ranges(storage, monkeypatch, range_bytes, requests):
    monkeypatch.setattr(reading, "RANGE_BYTES", range_bytes)
    assert read_object(storage, "x", len(DATA), digest_bytes(DATA)) == DATA
    assert len(storage.requests) == len(storage.names("read")) == requests


@pytest.mark.parametrize("range_bytes", [1000, 300])
@pytest.mark.parametrize(
    "damaged",
    [DATA[:-1], DATA[:1], b"", DATA[:700] + b"?" + DATA[701:], None],
    ids=["cut", "byte", "empty", "bit", "gone"],
)
def test_damage_is_named_however_it_is_read(storage, monkeypatch, damaged, range_bytes):
    monkeypatch.setattr(reading, "RANGE_BYTES", range_bytes)
    storage.delete("x")
    if damaged is not None:
        storage.write("x", damaged)
    with pytest.raises(DamageError, match="missing" if damaged is None else r"x.*(damaged|shorter)"):
        read_object(storage, "x", len(DATA), digest_bytes(DATA))


@pytest.mark.parametrize(("range_bytes", "found_by"), [(1000, read_object), (300, check_end)])
def test_longer_object_is_damage(storage, monkeypatch, range_bytes, found_by):
    """Zarr would look for a shard's index at its end."""
    monkeypatch.setattr(reading, "RANGE_BYTES", range_bytes)
    digest = [digest_bytes(DATA)] if found_by is read_object else []
    found_by(storage, "x", len(DATA), *digest)
    storage.write("x", DATA + b"\0")
    with pytest.raises(DamageError, match=r"x: damaged: 1000 bytes were sealed, 1001 found"):
        found_by(storage, "x", len(DATA), *digest)


def test_verifying_a_part_notices_what_follows_an_object_of_several_ranges(storage, monkeypatch):
    staged = stage("text", {"bytes": ArrayToStore(np.frombuffer(DATA, np.uint8))}, {})
    upload(storage, staged)
    monkeypatch.setattr(reading, "RANGE_BYTES", 300)
    part, name = Part(storage, staged.digest), "bytes/c/0"
    assert part.damage() == []
    storage.write(f"{part.path}/{name}", staged.objects[name] + b"\0")
    (fault,) = part.damage()
    assert name in fault
    assert "verify" in fault


# Dense arrays


def encoded(values: np.ndarray) -> tuple[dict, dict[str, bytes]]:
    objects = stage("text", {"x": ArrayToStore(values)}, {}).objects
    return json.loads(objects["x/zarr.json"]), {key[2:]: data for key, data in objects.items() if key[2:4] == "c/"}


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(1,), (70_000,), (70_000, 2), (65_536, 3)])
def test_own_layout_needs_no_zarr(monkeypatch, dtype, shape):
    values = np.random.default_rng(1).integers(0, 2, shape).astype(dtype)
    metadata, objects = encoded(values)
    monkeypatch.setattr(dense_arrays, "_decode_by_zarr", None)
    found = decode_dense(metadata, objects)
    assert found.dtype == dtype
    assert np.array_equal(found, values)


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (10, 3)},
        {"chunks": (10, 1), "shards": (20, 3)},
        {"chunks": (10, 3), "shards": (40, 3)},
        {"chunks": (10, 1), "shards": (40, 3), "compressors": [ZstdCodec(level=1)]},
        {"chunks": (10, 1), "shards": (40, 3), "compressors": None},
        {"chunks": (10, 1), "shards": (40, 3), "compressors": [Crc32cCodec()]},
        {"chunks": (10, 1), "shards": (40, 3), "dtype": "float64"},
        {"chunks": (10, 1), "shards": (40, 3), "dtype": ">i4"},
        {"chunks": (10, 1), "shards": (40, 3), "filters": [{"name": "transpose", "configuration": {"order": [1, 0]}}]},
    ],
)
def test_other_layouts_go_through_zarr(options):
    values = np.arange(120).reshape(40, 3)
    store = MemoryStore()
    array = zarr.create_array(store, name="x", **{"shape": (40, 3), "dtype": "int32", **options})
    array[:] = values
    objects = {key: data.to_bytes() for key, data in store._store_dict.items()}
    metadata = json.loads(objects.pop("x/zarr.json"))
    assert np.array_equal(
        decode_dense(metadata, {key[2:]: data for key, data in objects.items() if key[:2] == "x/"}), values
    )


def test_chunk_that_is_left_out_reads_as_fill():
    store = MemoryStore()
    compressors = [ZstdCodec(), Crc32cCodec()]
    array = zarr.create_array(
        store, name="x", shape=(40,), dtype="int32", chunks=(10,), shards=(40,), compressors=compressors, fill_value=7
    )
    array[10:20] = 5
    metadata = json.loads(store._store_dict["x/zarr.json"].to_bytes())
    found = decode_dense(metadata, {"c/0": store._store_dict["x/c/0"].to_bytes()})
    assert found.tolist() == [7] * 10 + [5] * 10 + [7] * 20


def test_any_damaged_byte_or_cut_of_a_shard_is_refused():
    metadata, objects = encoded(np.arange(300, dtype=np.int32).reshape(100, 3))
    ((key, shard),) = objects.items()
    for place in range(len(shard)):
        with pytest.raises(DamageError):
            decode_dense(metadata, {key: shard[:place] + bytes([shard[place] ^ 1]) + shard[place + 1 :]})
        with pytest.raises(DamageError):
            decode_dense(metadata, {key: shard[:place]})


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [100]},
        {"data_type": "int64"},
        {"data_type": "x"},
        {"codecs": []},
        {"shape": None},
    ],
)
def test_metadata_that_does_not_fit_the_bytes_is_refused(change):
    metadata, objects = encoded(np.arange(300, dtype=np.int32).reshape(100, 3))
    with pytest.raises(DamageError):
        decode_dense({**metadata, **change}, objects)
