"""Verify: every file of a complete store damaged in turn is named; and inspect, which counts what is there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import zarr
from stores import DATASET, ENTRIES, fill_store

from logitstore import versions
from logitstore.errors import StoreError
from logitstore.inspection import describe_dataset, describe_store, view_document
from logitstore.manifest import Manifest
from logitstore.parts import Part
from logitstore.plan import HELD_OUT
from logitstore.recipes import Answer
from logitstore.records import open_record, seal_record
from logitstore.signals import read_scalars, read_sparse
from logitstore.staging import ArrayToStore, stage, upload
from logitstore.storage import LocalStorage
from logitstore.store import Store
from logitstore.verification import verify


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A complete store in a folder that every test leaves as it found it, and its dataset."""
    return fill_store(str(tmp_path_factory.mktemp("stores") / "store"), tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def store(filled):
    return filled[0]


@pytest.fixture
def version(filled):
    return filled[1]


def files_of(store: Store) -> list[str]:
    return sorted(store.storage.list(""))


def test_complete_store_is_clean(store, version):
    told = []
    found = verify(store, lambda done, total: told.append((done, total)))
    assert found.faults == ()
    assert found.num_uncommitted == 0
    num_blocks = len(version.manifest.plan.blocks)
    assert found.num_parts == 6 * num_blocks  # text, tokens twice, alignment, scalars, sparse
    parts = [name for name in files_of(store) if name.startswith("parts/")]
    assert found.num_objects == len(files_of(store)) - len(parts)
    assert told[0] == (0, found.num_parts)
    assert told[-1] == (found.num_parts, found.num_parts)


def test_every_file_flipped_is_named(store):
    """One byte of each file of the store. Nothing in it may be damaged without a word."""
    missed = []
    for name in files_of(store):
        path = Path(store.storage.url) / name
        data = path.read_bytes()
        # In records and seals a letter, so that they stay JSON of the same form.
        position = next(n for n in range(len(data) // 2, len(data)) if data[n : n + 1].isalnum() or not is_text(data))
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        try:
            if not any(name in fault for fault in verify_near(store, name)):
                missed.append(name)
        finally:
            path.write_bytes(data)
    assert missed == []
    assert verify(store).faults == ()


def is_text(data: bytes) -> bool:
    return data[:1] == b"{"


def verify_near(store: Store, name: str) -> tuple[str, ...]:
    """What ``verify`` says of one damaged file, without the half second that all the whole ones take."""
    if name.startswith("parts/"):
        return tuple(store.part(name.split("/")[1]).damage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "damage", lambda part: [])
        return verify(store).faults


def test_every_file_lost_is_named_if_anything_refers_to_it(store):
    """Nothing refers to a dataset's newest version but its name, nor to the recipe of a plan that a version names."""
    unmissed = set()
    for name in files_of(store):
        path = Path(store.storage.url) / name
        data = path.read_bytes()
        path.unlink()
        try:
            faults = verify_near(store, name)
        finally:
            path.write_bytes(data)
        if not faults:
            unmissed.add(name)
        else:
            assert any(name in fault and "missing" in fault for fault in faults)
    assert all(name.startswith(("datasets/", "recipes/")) for name in unmissed)
    for name in unmissed - {f"datasets/{DATASET}/1.json"}:
        assert "plan" in open_record(store.storage.read(name), name)["result"]
    assert verify(store).faults == ()


@pytest.fixture
def copy(store, tmp_path):
    """A copy to spoil."""
    shutil.copytree(store.storage.url, tmp_path / "copy")
    return Store.open(str(tmp_path / "copy"))


def test_verify_names_all_damaged_objects_of_parts_at_once(copy):
    damaged = [name for name in files_of(copy) if name.endswith(("c/0/0", "documents/zarr.json"))]
    for name in damaged:
        data = copy.storage.read(name)
        copy.storage.write(name, data[:-1] + bytes([data[-1] ^ 128]))
    faults = verify(copy).faults
    assert len(faults) == len(damaged) > 10
    assert all(any(name in fault for fault in faults) for name in damaged)


def test_verify_of_a_lost_folder_names_every_part(copy):
    shutil.rmtree(Path(copy.storage.url) / "parts")
    found = verify(copy)
    assert len(found.faults) == found.num_parts
    assert all("seal.json: missing" in fault for fault in found.faults)


def test_verify_of_what_cannot_be_read_goes_on(copy, monkeypatch):
    """A bad sector is damage of that object, not the end of the check."""
    spoiled = next(name for name in files_of(copy) if name.endswith("sparse/c/0/0"))
    read = Path.read_bytes

    def read_bytes(self):
        if str(self).endswith(spoiled):
            raise OSError(5, "Input/output error")
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    (fault,) = verify(copy).faults
    assert spoiled in fault
    assert "Input/output error" in fault


def test_uncommitted_parts_are_counted_and_are_no_damage(copy):
    """What a killed writer leaves: a whole part without a recipe, half a part, half a file."""
    whole, half = (stage("text", {"x": ArrayToStore(zarr.ones(3)[...] * n)}, {}) for n in (1.0, 2.0))
    upload(copy.storage, whole)
    copy.storage.write(f"parts/{half.digest}/seal.json", half.seal)
    (Path(copy.storage.url) / "tmp").mkdir(exist_ok=True)
    (Path(copy.storage.url) / "tmp" / "half").write_bytes(b"half a f")
    found = verify(copy)
    assert (found.faults, found.num_uncommitted) == ((), 2)


def test_damage_of_a_part_whose_recipe_is_lost_is_found(copy, version):
    """Manifests refer to parts directly, and students read by them."""
    part = version.manifest.columns[0].cells[0].part
    for name in files_of(copy):
        if name.startswith("recipes/"):
            (Path(copy.storage.url) / name).unlink()
    data = f"parts/{part}/bytes/c/0"
    copy.storage.write(data, copy.storage.read(data)[:-1])
    faults = verify(copy).faults
    assert any(data in fault for fault in faults)
    assert sum("recipes/" in fault and "missing" in fault for fault in faults) == verify(copy).num_parts


def test_recipe_that_names_another_content_than_its_part_is_found(copy):
    name = next(name for name in files_of(copy) if name.startswith("recipes/") and b'"part"' in copy.storage.read(name))
    record = open_record(copy.storage.read(name), name)
    record["result"]["content"] = "00" * 32
    copy.storage.write(name, seal_record(record))
    (fault,) = verify(copy).faults
    assert name in fault
    assert "names content 0000" in fault


def test_recipe_under_another_name_is_found(copy):
    names = [name for name in files_of(copy) if name.startswith("recipes/")]
    copy.storage.write(names[0], copy.storage.read(names[1]))
    assert any(names[0] in fault and "another recipe" in fault for fault in verify(copy).faults)


def test_dropped_version_of_a_dataset_is_no_damage(copy):
    copy.publish(DATASET, lambda current: Manifest(current.plan_digest, current.plan, current.columns[:1]))
    versions.drop_version(copy.storage, versions.read_version(copy.storage, DATASET, 1))
    assert verify(copy).faults == ()
    assert copy.datasets() == {DATASET: 2}


def test_lost_record_of_an_older_version_is_found(copy):
    """Numbers have no gaps."""
    copy.publish(DATASET, lambda current: Manifest(current.plan_digest, current.plan, current.columns[:1]))
    copy.storage.delete(f"datasets/{DATASET}/1.json")
    (fault,) = verify(copy).faults
    assert f"datasets/{DATASET}/1.json: missing" in fault


def test_verify_of_a_dataset_looks_at_what_it_reaches(copy, version):
    """Another dataset has only the text; damage of the rest is none of its own."""
    copy.publish("text", lambda current: replace(version.manifest, columns=version.manifest.columns[:1]))
    text, other = (version.manifest.columns[n].cells[0].part for n in (0, -1))
    spoil(copy, f"parts/{other}/seal.json")
    assert verify(copy, dataset="text").faults == ()
    assert verify(copy, dataset="text").num_parts == len(version.manifest.plan.blocks)
    assert len(verify(copy, dataset=DATASET).faults) == 1
    spoil(copy, f"parts/{text}/bytes/c/0")
    assert len(verify(copy, dataset="text").faults) == 1
    with pytest.raises(StoreError, match="no dataset 'x'; there are: demo, text"):
        verify(copy, dataset="x")


def test_verify_of_a_dataset_finds_what_all_of_it_refers_to(copy):
    for name in files_of(copy):
        if name.startswith(("plans/", "manifests/", "assets/", "pages/")):
            data = copy.storage.read(name)
            copy.storage.write(name, data[:-1])
            assert any(name in fault for fault in verify(copy, dataset=DATASET).faults)
            copy.storage.delete(name)
            assert any(name in fault for fault in verify(copy, dataset=DATASET).faults)
            copy.storage.write(name, data)


def test_samples_find_damage_as_often_as_they_are_large(copy, monkeypatch):
    num_parts = verify(copy).num_parts
    monkeypatch.setattr(Part, "damage", lambda part: [part.digest])
    seen: set[str] = set()
    for seed in range(40):
        found = verify(copy, sample=25, seed=seed)
        assert found.num_parts == len(found.faults) == -(-num_parts // 4)
        assert found.num_left_out == num_parts - found.num_parts
        seen |= set(found.faults)
    assert len(seen) == num_parts
    assert verify(copy, sample=25, seed=1) == verify(copy, sample=25, seed=1)
    assert verify(copy, sample=25).num_parts == -(-num_parts // 4)


def spoil(store: Store, name: str) -> None:
    data = store.storage.read(name)
    store.storage.write(name, data[:-1] + bytes([data[-1] ^ 1]))


def test_version_published_after_the_listing_is_no_damage(copy, version, monkeypatch):
    """Producers may work on while a store is verified."""
    late = Answer({"plan": version.manifest.plan_digest}, {})
    listed = LocalStorage.list

    def list_then_publish(self, prefix):
        names = list(listed(self, prefix))
        if prefix == "" and not late.stats:
            late.stats["done"] = 1
            copy.put_asset(b"new")
            copy.publish("late", lambda current: version.manifest)
        return iter(names)

    monkeypatch.setattr(LocalStorage, "list", list_then_publish)
    assert verify(copy).faults == ()
    assert "late" in copy.datasets()


# Inspection


def test_describe_dataset_has_what_scripts_read(store, version):
    found = describe_dataset(store, version)
    assert found["manifest_digest"] == version.manifest.identity
    assert found["num_documents"] == 24
    assert found["num_duplicates"] == 1
    assert 0 < found["num_held_out_documents"] < 24
    assert found["num_tokens"] == sum(
        rows_of(store, column) for column in version.manifest.find("tokens") if column.label == "teacher"
    )
    assert set(found["bytes_per_token"]) == {"text", "tokens", "signals", "alignments", "total"}
    *parts, total = found["bytes_per_token"].values()
    assert all(size > 0 for size in parts)
    assert total == pytest.approx(sum(parts)) == pytest.approx(found["total_bytes"] / found["num_tokens"])
    (teacher,) = found["teachers"]
    assert (teacher["name"], teacher["signals"]) == ("made-up", ["scalars", f"sparse topk:{ENTRIES}"])
    (alignment,) = found["alignments"]
    assert alignment["student_tokenizer"] == "student"
    assert alignment["coverage"] == 1.0
    assert alignment["num_spans"] > 100
    assert json.loads(json.dumps(found)) == found
    assert describe_store(store) == {"store": store.storage.url, "datasets": {DATASET: found}}


def rows_of(store: Store, column) -> int:
    return sum(len(store.part(cell.part).array("tokens")) for cell in column.cells)


def test_describe_dataset_counts_the_bytes_that_are_there(store, version):
    """The figures come from records; the files must agree."""
    on_disk = sum(
        (Path(store.storage.url) / name).stat().st_size for name in files_of(store) if name.startswith("parts/")
    )
    assert describe_dataset(store, version)["total_bytes"] == on_disk


def test_example_paths_open_with_zarr(store, version):
    for column in describe_dataset(store, version)["columns"]:
        group = zarr.open_group(column["example"], mode="r")
        assert group.attrs["logitstore"]["kind"] == column["kind"]
        assert column["num_holes"] == 0


def test_view_document_shows_tokens_with_candidates(store, version):
    seen = []
    for number in range(24):
        view = view_document(store, version, number)
        assert view.teacher == "made-up"
        assert view.source.endswith("corpus.jsonl")
        assert view.tokens[0].logprob is None  # nothing before it, so not scored
        assert view.tokens[0].candidates == ()
        for token in view.tokens[1:]:
            assert token.logprob == pytest.approx(-0.6931, abs=1 / 32)
            assert len(token.candidates) == ENTRIES
            assert token.candidates[0][0] == token.text
            logprobs = [logprob for _, logprob, _ in token.candidates]
            assert logprobs == sorted(logprobs, reverse=True)
        seen.append("".join(token.text for token in view.tokens))
    assert sum("Return a list of the lines" in text for text in seen) == 8
    assert view_document(store, version, 3, "made-up").block == view_document(store, version, 3).block


def test_view_document_of_held_out_blocks_is_of_those(store, version):
    first = 0
    for number, block in enumerate(version.manifest.plan.blocks):
        assert view_document(store, version, first).block == number
        first += block.num_documents
    assert any(block.split == HELD_OUT for block in version.manifest.plan.blocks)


@pytest.mark.parametrize("number", [-1, 24, 10**9])
def test_view_document_that_is_not_there_says_which_are(store, version, number):
    with pytest.raises(StoreError, match=f"document {number}: the dataset has documents 0 to 23"):
        view_document(store, version, number)


def test_view_document_of_an_unknown_teacher_lists_those_there_are(store, version):
    with pytest.raises(StoreError, match="'nobody' in this dataset; teachers: made-up"):
        view_document(store, version, 0, "nobody")


def test_signals_read_back_as_they_were_made(store, version):
    (sparse,) = version.manifest.find("signal", signal="sparse")
    (scalars,) = version.manifest.find("signal", signal="scalars")
    signal = read_sparse(store.column_part(sparse, 0))
    columns, scored = read_scalars(store.column_part(scalars, 0))
    assert signal.temperatures == (1.0, 2.0)
    assert signal.draw_weight is None
    assert (signal.rows.scored == scored).all()
    assert (signal.rest == -2.0).all()
    assert list(columns)[:2] == ["logprob", "rank"]
    assert list(columns)[-1] == "log_z_ratio@2"
