"""The commands that look after a store: verify with its repairs, gc, dataset, copy, and --pin."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from stores import DATASET, fill_store
from terminal import run_here

from logitstore.cli.main import cli
from logitstore.store import Store


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> str:
    store, _ = fill_store(str(tmp_path_factory.mktemp("stores") / "store"), tmp_path_factory.mktemp("inputs"))
    return store.storage.url


@pytest.fixture
def url(filled, tmp_path) -> str:
    shutil.copytree(filled, tmp_path / "store")
    return str(tmp_path / "store")


def run(*arguments: str, code: int = 0, **options) -> Result:
    result = CliRunner().invoke(cli, arguments, standalone_mode=False, **options)
    if result.exception is not None:
        raise result.exception
    assert (result.return_value or 0) == code, result.output
    return result


def as_json(*arguments: str, code: int = 0) -> dict:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def identity(url: str) -> str:
    return Store.open(url).dataset(DATASET).manifest.identity


def spoil(url: str, name: str) -> None:
    path = Path(url) / name
    path.write_bytes(path.read_bytes()[:-3])


def a_data_object(url: str) -> str:
    return sorted(str(path.relative_to(url)) for path in Path(url).glob("parts/*/sparse/c/*/*"))[0]


def test_verify_samples(url):
    whole = as_json("verify", url)
    some = as_json("verify", url, "--sample", "10%", "--seed", "3")
    assert some["num_parts"] == -(-whole["num_parts"] // 10)
    assert some["num_parts"] + some["num_left_out"] == whole["num_parts"]
    assert "left out of the sample" in run("verify", url, "--sample", "10").output
    assert as_json("verify", url, "--dataset", DATASET)["faults"] == []


@pytest.mark.parametrize("sample", ["0", "101", "-1", "many"])
def test_verify_refuses_samples_that_are_none(capsys, url, sample):
    assert "expected per cent" in run_here(capsys, "verify", url, f"--sample={sample}").refusal()


def test_verify_repairs(url, filled):
    name = a_data_object(url)
    spoil(url, name)
    assert name in run("verify", url, code=1).output
    done = as_json("verify", url, "--repair")
    assert done["dropped"] == ["/".join(name.split("/")[:2])]
    assert done["beyond"] == {}
    assert run("verify", url, code=1)  # the manifest still waits for it
    assert as_json("verify", url, "--repair", "--from", filled)["restored"] != []
    assert "every digest holds" in run("verify", url).output
    assert (Path(url) / name).read_bytes() == (Path(filled) / name).read_bytes()


def test_verify_repairs_what_hides_behind_a_damaged_manifest(url, filled):
    (manifest,) = Path(url).glob("manifests/*")
    for name in (str(manifest.relative_to(url)), "store.json", a_data_object(url)):
        spoil(url, name)
    assert "logitstore dataset drop" in run("verify", url, "--repair", code=1).output
    run("verify", url, "--repair", "--from", filled)
    assert "every digest holds" in run("verify", url).output


def test_verify_from_without_repair_is_refused(capsys, url, filled):
    assert "goes with --repair" in run_here(capsys, "verify", url, "--from", filled).refusal()


def test_drop_then_gc_frees_a_dataset(url):
    num_files = sum(path.is_file() for path in Path(url).rglob("*"))
    assert "0 found unreachable" in run("gc", url, "--grace", "0s").output
    run("dataset", "drop", url, DATASET, "--yes")
    told = as_json("gc", url, "--grace", "0s", "--dry-run")
    assert len(told["sentenced"]) > 10
    assert told == as_json("gc", url, "--grace", "0s") | {"dry_run": True}
    done = as_json("gc", url, "--grace", "0s")
    # What weighs little stays for an hour at least.
    assert {target.split("/")[0] for target in done["freed"]} == {"parts"}
    assert done["num_bytes_freed"] > 0
    assert sum(path.is_file() for path in Path(url).rglob("*")) < num_files / 2
    assert "every digest holds" in run("verify", url).output


@pytest.mark.parametrize("grace", ["7", "a week", "-1d", ""])
def test_gc_refuses_times_that_are_none(capsys, url, grace):
    assert "as in 7d" in run_here(capsys, "gc", url, f"--grace={grace}").refusal()


def test_dataset_list_drop_and_pin(capsys, url):
    store = Store.open(url)
    first = identity(url)
    for number in (2, 3):
        store.publish(DATASET, lambda current, number=number: replace(current, columns=current.columns[:-number]))
    assert [version["version"] for version in as_json("dataset", "list", url)["versions"]] == [1, 2, 3]
    assert f"--pin {first}" in run("dataset", "pin", url, DATASET, "--version", "1").output
    with pytest.raises(click.Abort):
        run("dataset", "drop", url, DATASET, input="n\n")
    assert as_json("dataset", "drop", url, DATASET, "--keep-last", "1", "--yes")["dropped"] == [1, 2]
    listed = as_json("dataset", "list", url)["versions"]
    assert [bool(version["dropped"]) for version in listed] == [True, True, False]
    assert [version["pinned"] for version in listed] == [True, False, False]
    assert listed[2]["num_bytes"] > 0
    assert "pinned" in run("dataset", "list", url).output
    assert as_json("inspect", url, "--dataset", DATASET, "--pin", first[:10])["manifest_digest"] == first
    assert "was dropped" in run_here(capsys, "inspect", url, "--dataset", DATASET, "--dataset-version", "1").refusal()
    run("dataset", "unpin", url, first[:8])
    assert (
        "no version with manifest" in run_here(capsys, "inspect", url, "--dataset", DATASET, "--pin", first).refusal()
    )
    assert "0 pins" in run_here(capsys, "dataset", "unpin", url, first).refusal()
    assert "no dataset 'x'" in run_here(capsys, "dataset", "drop", url, "x", "--yes").refusal()


def test_train_refuses_another_manifest_than_the_pinned(capsys, url, tmp_path):
    arguments = ("train", url, "--dataset", DATASET, "--output", str(tmp_path / "run"), "--student", "s")
    assert "no version with manifest 00000000" in run_here(capsys, *arguments, "--pin", "00000000").refusal()


def test_copy_copies_all_datasets_or_one(capsys, url, tmp_path):
    store, there = Store.open(url), str(tmp_path / "there")
    store.publish("other", lambda current: store.dataset(DATASET).manifest)
    done = as_json("copy", url, there)
    assert [(each["dataset"], each["version"]) for each in done["copied"]] == [(DATASET, 1), ("other", 1)]
    assert done["copied"][0]["num_objects"] > 20
    assert done["copied"][1]["num_objects"] == 0  # all of it is there already, and so is its manifest
    assert "every digest holds" in run("verify", there).output
    assert "0 objects copied" in run("copy", url, there, "--dataset", f"{DATASET}@1").output
    assert as_json("copy", url, there, "--dataset", DATASET, "--as", "new")["copied"][0]["dataset"] == "new"
    for arguments, expected in [
        (("--as", "x"), "name one dataset"),
        (("--dataset", "d@x"), "expected NAME or NAME@N"),
        (("--dataset", "nobody"), "no dataset 'nobody'"),
        (("--dataset", f"{DATASET}@9"), "no version 9"),
    ]:
        assert expected in run_here(capsys, "copy", url, there, *arguments).refusal()
    assert "is the store to copy from" in run_here(capsys, "copy", url, url).refusal()
