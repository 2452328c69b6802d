"""Fingerprints of teachers: the same for the same tensors and settings however they are filed, else different."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from teachers import build_model, save_teacher

from logitstore.errors import ModelError
from logitstore.producer import fingerprint as module
from logitstore.producer.fingerprint import fingerprint_model, weight_files


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITSTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_teacher(tmp_path / "teacher")


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _no_reading(file: Path) -> dict[str, str]:
    raise AssertionError(f"{file} was read again")


def test_fingerprint_same_for_shards_of_any_size(folder: Path, tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path / "shards", max_shard_size="12KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert fingerprint_model(tmp_path / "shards") == fingerprint_model(folder)


def test_fingerprint_same_under_other_file_names(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    build_model().save_pretrained(shards, max_shard_size="12KB")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        (shards / name).rename(shards / f"part{number}.safetensors")
        index["weight_map"] = {
            tensor: f"part{number}.safetensors" if file == name else file
            for tensor, file in index["weight_map"].items()
        }
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint_model(shards) == fingerprint_model(folder)


def test_fingerprint_ignores_bookkeeping(folder: Path) -> None:
    before = fingerprint_model(folder)
    _edit_config(folder, _name_or_path="elsewhere", transformers_version="9.9", use_cache=False, unused=None)
    assert fingerprint_model(folder) == before


def test_fingerprint_ignores_metadata_and_order_of_file(folder: Path) -> None:
    before = fingerprint_model(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(dict(reversed(tensors.items())), folder / "model.safetensors", {"format": "pt", "note": "again"})
    assert fingerprint_model(folder) == before


def test_fingerprint_ignores_weights_that_are_not_loaded(folder: Path) -> None:
    before = fingerprint_model(folder)
    save_file({"other": torch.ones(2)}, folder / "consolidated.safetensors")
    assert fingerprint_model(folder) == before


def test_fingerprint_differs_by_one_bit_of_a_weight(folder: Path) -> None:
    before = fingerprint_model(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert fingerprint_model(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rms_norm_eps": 2e-6},
        {"final_logit_softcapping": 30.0},
        {"sliding_window": 16},
        {"quantization_config": {"quant_method": "x"}},
        {"text_config": {"hidden_act": "gelu"}},
    ],
    ids=str,
)
def test_fingerprint_differs_by_what_bears_on_output(change: dict[str, Any], folder: Path) -> None:
    before = fingerprint_model(folder)
    _edit_config(folder, **change)
    assert fingerprint_model(folder) != before


def test_fingerprint_differs_by_name_and_shape_of_tensor(tmp_path: Path) -> None:
    found = set()
    for number, tensors in enumerate(({"a": torch.ones(4)}, {"b": torch.ones(4)}, {"a": torch.ones(2, 2)})):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text("{}")
        save_file(tensors, tmp_path / str(number) / "model.safetensors")
        found.add(fingerprint_model(tmp_path / str(number)))
    assert len(found) == 3


def test_fingerprint_covers_code_that_is_run(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("SCALE = 1\n")
    assert fingerprint_model(folder, trust_code=True) != fingerprint_model(folder)
    before = fingerprint_model(folder, trust_code=True)
    (folder / "modeling_own.py").write_text("SCALE = 2\n")
    assert fingerprint_model(folder, trust_code=True) != before


# The cache


def test_second_fingerprint_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_model(folder)
    monkeypatch.setattr(module, "_safetensors_digests", _no_reading)
    assert fingerprint_model(folder) == before


def test_cache_is_not_trusted_when_file_changes(folder: Path) -> None:
    before = fingerprint_model(folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    modified = file.stat().st_mtime_ns
    file.write_bytes(data)
    os.utime(file, ns=(modified + 1, modified + 1))
    assert fingerprint_model(folder) != before


def test_damaged_cache_is_made_again(folder: Path, tmp_path: Path) -> None:
    before = fingerprint_model(folder)
    for entry in (tmp_path / "cache" / "fingerprints").iterdir():
        entry.write_text("{")
    assert fingerprint_model(folder) == before


def test_cache_that_cannot_be_written_is_done_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fingerprint_model(folder)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOGITSTORE_CACHE", str(tmp_path / "file" / "cache"))
    assert fingerprint_model(folder) == expected


# Folders that are refused


def test_pickled_weights_refused_unless_allowed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="--allow-pickle"):
        fingerprint_model(folder)
    assert fingerprint_model(folder, allow_pickle=True)
    assert weight_files(folder, allow_pickle=True) == [folder / "pytorch_model.bin"]


def test_safetensors_taken_though_pickles_lie_beside_them(folder: Path) -> None:
    before = fingerprint_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert fingerprint_model(folder, allow_pickle=True) == before


def test_folder_without_weights_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor its index"):
        fingerprint_model(folder)


def test_index_without_its_shards_refused(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path, max_shard_size="12KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}: missing"):
        fingerprint_model(tmp_path)


def test_adapter_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge it into the model"):
        fingerprint_model(folder)


@pytest.mark.parametrize("kept", [4, 40, 2000])
def test_truncated_safetensors_refused(kept: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        fingerprint_model(folder)


def test_file_of_something_else_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="not a safetensors file"):
        fingerprint_model(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_config_that_is_no_object_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        fingerprint_model(folder)
