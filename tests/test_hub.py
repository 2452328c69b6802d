"""Models by folder or hub id; the hub itself is not asked."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from logitstore.errors import ModelError
from logitstore.hub import resolve_folder, split_model

_FILES = {
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "modeling_own.py",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}
_TOKENIZER = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the hub was asked for last; its answer is an empty folder."""
    asked: dict[str, Any] = {}

    def snapshot_download(model: str, **options: Any) -> str:
        asked.update(model=model, **options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, _FILES - {"pytorch_model.bin"}),
        ({"pickle": True}, _FILES),
        ({"tokenizer_only": True}, _TOKENIZER),
    ],
)
def test_hub_is_asked_for_what_is_loaded(asked: dict[str, Any], options: dict[str, bool], expected: set[str]) -> None:
    resolve_folder("org/model", "v1", **options)
    assert (asked["model"], asked["revision"]) == ("org/model", "v1")
    assert {file for file in _FILES if any(fnmatch(file, pattern) for pattern in asked["allow_patterns"])} == expected


def test_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nothing", "/no/such/folder", "a/b/c"])
def test_what_looks_like_a_path_is_not_asked_for(model: str, asked: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_folder(model)
    assert not asked


def test_split_model(tmp_path: Path) -> None:
    assert split_model("org/model") == ("org/model", None)
    assert split_model("org/model@v1") == ("org/model", "v1")
    (tmp_path / "a@b").mkdir()
    assert split_model(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), None)
