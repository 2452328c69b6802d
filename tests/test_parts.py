"""Parts: identity that no encoding changes, every byte checked, and plain zarr as the way in."""

from __future__ import annotations

import json
from uuid import uuid4

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from sparse_strategies import assert_equal_rows, random_rows, rows_of, sparse_rows

from logitstore import staging
from logitstore.digests import digest_bytes
from logitstore.errors import DamageError, StoreError
from logitstore.parts import Part
from logitstore.sparse import FILL
from logitstore.staging import ArrayToStore, StagedPart, content_digest, stage, upload
from logitstore.storage import RemoteStorage, open_storage

ROWS = random_rows(300)
ARRAYS = {
    "sparse": ArrayToStore(ROWS, {"unit": "nat"}),
    "rest": ArrayToStore(np.linspace(-9, 0, 600, dtype=np.float32).reshape(300, 2), {"columns": ["a", "b"]}),
    "scored": ArrayToStore(ROWS.scored),
}


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "store") if request.param == "folder" else f"memory://{uuid4().hex}"


@pytest.fixture
def staged():
    return stage("signal", ARRAYS, {"signal": "sparse"})


def stored(url: str, staged: StagedPart) -> Part:
    storage = open_storage(url)
    upload(storage, staged)
    return Part(storage, staged.digest)


# What goes in comes out


def test_part_reads_back(url, staged):
    part = stored(url, staged)
    assert (part.kind, part.content) == ("signal", staged.content)
    assert part.array_names() == ["rest", "scored", "sparse"]
    assert_equal_rows(part.sparse(), ROWS)
    for name in ("rest", "scored"):
        assert np.array_equal(part.array(name), ARRAYS[name].values)
        assert part.array(name).dtype == ARRAYS[name].values.dtype
    assert part.attributes("rest") == {"columns": ["a", "b"]}
    assert [part.is_sparse(name) for name in part.array_names()] == [False, False, True]
    assert part.damage() == []


def test_plain_zarr_reads_a_part(url, staged):
    part = stored(url, staged)
    group = zarr.open_group(f"{url}/parts/{staged.digest}", mode="r")
    assert zarr.open_group(open_storage(url).child_url(part.path), mode="r").attrs["logitstore"]["kind"] == "signal"
    assert sorted(group.array_keys()) == ["rest", "scored", "sparse"]
    assert np.array_equal(group["sparse"][...], ROWS.rectangle(int(ROWS.counts.max())))
    assert np.array_equal(group["sparse"][17:23, 0], ROWS.rectangle(20)[17:23, 0])
    assert np.array_equal(group["rest"][5:7, 1], ARRAYS["rest"].values[5:7, 1])
    assert group["sparse"].attrs["unit"] == "nat"


@settings(max_examples=15)
@given(sparse_rows())
def test_any_sparse_rows_read_back(rows):
    part = stored(f"memory://{uuid4().hex}", stage("signal", {"sparse": ArrayToStore(rows)}, {}))
    assert_equal_rows(part.sparse(), rows)
    assert part.damage() == []


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (70_000,), (70_000, 2)])
def test_dense_arrays_of_every_kind_read_back(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    if dtype == np.float32:
        values[::3] = np.nan
    part = stored(f"memory://{uuid4().hex}", stage("text", {"x": ArrayToStore(values)}, {}))
    assert np.array_equal(part.array("x"), values, equal_nan=dtype == np.float32)
    assert part.array("x").dtype == dtype
    assert part.damage() == []


def test_array_of_nothing_but_fill_is_stored_all_the_same():
    """Zarr would leave it out, and then a lost object would read as fill."""
    staged = stage("text", {"x": ArrayToStore(np.zeros(100, np.int32))}, {})
    assert "x/c/0" in staged.objects


def test_sparse_rows_without_any_entry_read_back():
    """A block of prompts alone: nothing was scored."""
    rows = rows_of([[]] * 5000)
    part = stored(f"memory://{uuid4().hex}", stage("signal", {"sparse": ArrayToStore(rows)}, {}))
    assert_equal_rows(part.sparse(), rows)
    assert (zarr.open_group(f"{part._storage.url}/{part.path}", mode="r")["sparse"][...] == FILL).all()


def test_array_that_is_not_there_is_named(url, staged):
    part = stored(url, staged)
    with pytest.raises(StoreError, match="no array 'logits'; it has rest, scored, sparse"):
        part.array("logits")


def test_part_has_at_most_two_data_objects_an_array_each_one_shard(staged):
    data = [name for name in staged.objects if not name.endswith("zarr.json")]
    assert data == ["rest/c/0/0", "scored/c/0", "sparse/c/0/0"]
    assert sum(staged.array_bytes().values()) == staged.num_bytes


# Identity


@pytest.mark.parametrize("setting", [{"_ZSTD_LEVEL": 1}, {"_CHUNK_VALUES": 64}, {"portable": True}], ids=str)
def test_content_does_not_depend_on_encoding(staged, monkeypatch, setting):
    portable = setting.pop("portable", False)
    for name, value in setting.items():
        monkeypatch.setattr(staging, name, value)
    other = stage("signal", ARRAYS, {"signal": "sparse"}, portable=portable)
    assert other.objects != staged.objects
    assert other.digest != staged.digest
    assert other.content == staged.content
    monkeypatch.undo()
    part = stored(f"memory://{uuid4().hex}", other)  # and a reader of today reads it
    assert part.damage() == []
    assert_equal_rows(part.sparse(), ROWS)


def test_content_does_not_depend_on_kind_attributes_or_order():
    reordered = dict(reversed(ARRAYS.items()))
    assert stage("signal", reordered, {"other": 1}).content == stage("text", ARRAYS, {}).content
    plain = {name: ArrayToStore(array.values) for name, array in ARRAYS.items()}
    assert stage("signal", plain, {}).content == stage("signal", ARRAYS, {}).content


def test_staging_twice_gives_the_same_bytes(staged):
    """So two workers that answer one recipe upload the same objects under the same name."""
    again = stage("signal", ARRAYS, {"signal": "sparse"})
    assert (again.digest, again.seal, again.objects) == (staged.digest, staged.seal, staged.objects)


@pytest.mark.parametrize(
    "other",
    [
        rows_of([[(1, 2, False)], [(3, 4, True)]]),
        rows_of([[(1, 2, False), (3, 4, False)], []]),
        rows_of([[], [(1, 2, False), (3, 4, True)]]),
        rows_of([[(1, 2, False), (3, 5, True)], []]),
        rows_of([[(1, 2, False), (3, 4, True)]]),
    ],
)
def test_content_tells_sparse_rows_apart(other):
    assert content_digest({"s": other}) != content_digest({"s": rows_of([[(1, 2, False), (3, 4, True)], []])})


# Damage


def read_all(part: Part) -> None:
    part.array("rest")
    part.array("scored")
    part.sparse()
    part.attributes("sparse")


def test_any_damaged_object_is_named(url, staged):
    """Each object in turn: a byte flipped, cut short, emptied, gone; then whole again."""
    part = stored(url, staged)
    storage = part._storage
    for name, data in {**staged.objects, "seal.json": staged.seal}.items():
        path = f"{part.path}/{name}"
        middle = len(data) // 2
        for damaged in (data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], data[:-1], b"", data + b"\0"):
            storage.write(path, damaged)
            check_named(Part(storage, part.digest), name)
        remove(storage, path)
        check_named(Part(storage, part.digest), name)
        storage.write(path, data)
    assert Part(storage, part.digest).damage() == []


def check_named(part: Part, name: str) -> None:
    faults = part.damage()
    assert len(faults) == 1
    assert f"{part.digest}/{name}" in faults[0]
    if not name.endswith("zarr.json"):  # which only people and zarr read: the seal says what is in them
        with pytest.raises(DamageError, match="verify") as caught:
            read_all(part)
        assert f"{part.digest}/{name}" in str(caught.value)


def remove(storage, path: str) -> None:
    if isinstance(storage, RemoteStorage):
        storage._fs.rm_file(storage._path(path))
    else:
        (storage.root / path).unlink()


def test_seal_of_another_part_is_refused(staged):
    """Objects and seal agree with one another, but not with the name."""
    other = stage("text", {"x": ArrayToStore(np.arange(3))}, {})
    storage = open_storage(f"memory://{uuid4().hex}")
    upload(storage, StagedPart(staged.digest, other.content, other.objects, other.seal))
    with pytest.raises(DamageError, match=r"seal\.json"):
        _ = Part(storage, staged.digest).content


@pytest.mark.parametrize("name", ["rest/c/0/0", "sparse/c/0/0", "rest/zarr.json", "sparse/zarr.json"])
def test_sealed_nonsense_is_damage(staged, name):
    """A writer that sealed what cannot be decoded: all digests hold, and still nothing is made of it."""
    body = json.loads(staged.seal)
    if name.endswith("0"):
        nonsense = staged.objects[name][:-1] + b"?"
    else:
        metadata = body["arrays"][name.split("/")[0]] = {"shape": [300, 9], "codecs": []}
        nonsense = json.dumps(metadata).encode()
    body["objects"][name] = {"bytes": len(nonsense), "digest": digest_bytes(nonsense)}
    seal = json.dumps(body).encode()
    forged = StagedPart(digest_bytes(seal), staged.content, {**staged.objects, name: nonsense}, seal)
    part = stored(f"memory://{uuid4().hex}", forged)
    assert len(part.damage()) == 1
    with pytest.raises(DamageError):
        read_all(part)


@pytest.mark.parametrize("nonsense", [b"", b"{}", b"{", b"other shape"])
def test_metadata_that_says_otherwise_than_the_seal_is_damage(staged, nonsense):
    """Else plain zarr and readers of the seal would see two different arrays under valid digests."""
    body, name = json.loads(staged.seal), "rest/zarr.json"
    if nonsense == b"other shape":
        nonsense = json.dumps({**body["arrays"]["rest"], "shape": [299, 2]}).encode()
    body["objects"][name] = {"bytes": len(nonsense), "digest": digest_bytes(nonsense)}
    seal = json.dumps(body).encode()
    forged = StagedPart(digest_bytes(seal), staged.content, {**staged.objects, name: nonsense}, seal)
    (fault,) = stored(f"memory://{uuid4().hex}", forged).damage()
    assert f"{name}: says otherwise than the seal" in fault


@pytest.mark.parametrize("missing", ["arrays", "objects"])
def test_seal_without_a_list_is_damage(staged, missing):
    body = {key: value for key, value in json.loads(staged.seal).items() if key != missing}
    seal = json.dumps(body).encode()
    part = stored(f"memory://{uuid4().hex}", StagedPart(digest_bytes(seal), staged.content, staged.objects, seal))
    with pytest.raises(DamageError, match=r"seal\.json"):
        part.array("rest")
    assert len(part.damage()) == 1


def test_sealed_content_that_is_not_the_objects_is_damage(staged):
    seal = staged.seal.replace(staged.content.encode(), b"0" * 64)
    part = stored(f"memory://{uuid4().hex}", StagedPart(digest_bytes(seal), "0" * 64, staged.objects, seal))
    assert "content 0000000000000000 was sealed" in part.damage()[0]


def test_upload_puts_the_seal_first(staged):
    """A part that a killed writer left half there tells what belongs to it."""
    order = []

    class Recording(RemoteStorage):
        def write(self, name, data):
            order.append(name)

    upload(Recording.__new__(Recording), staged)
    assert order[0] == f"parts/{staged.digest}/seal.json"
    assert set(order[1:]) == {f"parts/{staged.digest}/{name}" for name in staged.objects}


def test_portable_part_uses_standard_codecs_only(tmp_path):
    staged = stage("signal", ARRAYS, {"signal": "sparse"}, portable=True)
    part = stored(str(tmp_path), staged)
    for name in part.array_names():
        assert "logitstore" not in json.dumps(part.index[name].metadata["codecs"])
    group = zarr.open_group(str(tmp_path / part.path), mode="r")
    assert np.array_equal(group["sparse"][...], ROWS.rectangle(int(ROWS.counts.max())))
    assert group["sparse"].fill_value == FILL
