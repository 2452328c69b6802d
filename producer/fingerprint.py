"""What a teacher is: a digest of its tensors and of the configuration that bears on its output.

Two folders with the same tensors under other file names, shards or bookkeeping have the same fingerprint. Digests of
files are cached by (path, size, modification time), so that a second run need not read 16 GB again.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from blake3 import blake3

from logitstore.digests import canonical_json, digest_bytes, digest_json
from logitstore.errors import ModelError

VERSION = "1"
# Bookkeeping that no logit depends on. Whatever is not listed here counts as bearing on the output.
_BOOKKEEPING = frozenset({
    "_name_or_path", "_commit_hash", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "return_dict",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


def fingerprint_model(folder: Path, *, allow_pickle: bool = False, trust_code: bool = False) -> str:
    """Hex digest of a model folder's weights and output-bearing configuration.

    Args:
        folder: as ``save_pretrained`` writes it.
        allow_pickle: take pickled weights if there are no others.
        trust_code: the folder's own modelling code is run, and counts.

    Raises:
        ModelError: no configuration, no weights, or weights in a form that was not asked for.
    """
    tensors: dict[str, str] = {}
    for file in weight_files(folder, allow_pickle=allow_pickle):
        tensors.update(_cached_digests(file))
    identity = {"version": VERSION, "config": output_bearing(read_config(folder)), "tensors": tensors}
    if trust_code:
        identity["code"] = {file.name: _file_digest(file) for file in sorted(folder.glob("*.py"))}
    return digest_json(identity)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"found {type(config).__name__}, expected an object")
        return config
    except FileNotFoundError:
        raise ModelError(f"{folder}: no config.json; a folder written by `save_pretrained` was expected") from None
    except ValueError as error:
        raise ModelError(f"{folder}/config.json: not a configuration: {error}") from error


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The files that transformers loads: safetensors, or pickles if they are allowed and there is nothing else.

    Others may lie beside them: the same weights in another layout, or an adapter, which is refused.

    Raises:
        ModelError: none, not all, or not of a form that was asked for.
    """
    if (folder / "adapter_config.json").exists():
        raise ModelError(f"{folder}: holds an adapter; merge it into the model (`merge_and_unload` of peft)")
    files = _listed_files(folder, "model.safetensors")
    pickles = _listed_files(folder, "pytorch_model.bin") if not files else []
    if pickles and not allow_pickle:
        raise ModelError(
            f"{folder}: only pickled weights ({pickles[0].name}), which can run any code when loaded; convert them to "
            "safetensors, or pass --allow-pickle if you trust them"
        )
    found = files or pickles
    if not found:
        raise ModelError(
            f"{folder}: neither model.safetensors nor its index; a folder written by `save_pretrained` was expected"
        )
    missing = next((file for file in found if not file.is_file()), None)
    if missing is not None:
        raise ModelError(f"{missing}: missing, and the index beside it lists it; copy or download the model again")
    return found


def _listed_files(folder: Path, name: str) -> list[Path]:
    """``name`` in the folder, or the shards that its index lists."""
    if (folder / name).is_file():
        return [folder / name]
    try:
        index = json.loads((folder / f"{name}.index.json").read_text())
        return [folder / file for file in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}/{name}.index.json: not an index of weights: {error}") from error


def output_bearing(value: Any) -> Any:
    """A configuration without bookkeeping, its floats as decimal strings."""
    if isinstance(value, dict):
        return {
            key: output_bearing(item) for key, item in value.items() if key not in _BOOKKEEPING and item is not None
        }
    if isinstance(value, list):
        return [output_bearing(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def _cached_digests(file: Path) -> dict[str, str]:
    status = file.stat()
    entry = digest_bytes(f"{VERSION}|{file.resolve()}|{status.st_size}|{status.st_mtime_ns}".encode())
    cache = _cache_folder() / f"{entry}.json"
    try:
        return json.loads(cache.read_text())
    except (OSError, ValueError):
        digests = _safetensors_digests(file) if file.suffix == ".safetensors" else {file.name: _file_digest(file)}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as temporary:
            json.dump(digests, temporary)
        os.replace(temporary.name, cache)
    except OSError:
        pass  # a cache that cannot be written costs time, not correctness
    return digests


def _safetensors_digests(file: Path) -> dict[str, str]:
    """Digest of each tensor's name, dtype, shape and bytes. A file is: 8-byte length, JSON header, tensor bytes."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        try:
            if header_bytes > file.stat().st_size:
                raise ValueError(f"a header of {header_bytes} bytes does not fit in it")
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise ModelError(f"{file}: not a safetensors file, or not all of one: {error}") from error
        header.pop("__metadata__", None)
        digests = {}
        for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = tensor["data_offsets"]
            stream.seek(8 + header_bytes + begin)
            hasher = blake3(canonical_json([name, tensor["dtype"], tensor["shape"]]), max_threads=blake3.AUTO)
            while begin < end:
                chunk = stream.read(min(end - begin, 64 << 20))
                if not chunk:
                    raise ModelError(f"{file}: truncated: tensor {name} ends past the file")
                hasher.update(chunk)
                begin += len(chunk)
            digests[name] = hasher.hexdigest()
    return digests


def _file_digest(file: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(file)
    return hasher.hexdigest()


def _cache_folder() -> Path:
    base = os.environ.get("LOGITSTORE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "logitstore"
    )
    return Path(base) / "fingerprints"
