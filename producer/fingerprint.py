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


def fingerprint_model(folder: Path, *, allow_pickle: bool = False) -> str:
    """Hex digest of a model folder's weights and output-bearing configuration.

    Raises:
        ModelError: no configuration, no weights, or weights in a form that was not asked for.
    """
    tensors: dict[str, str] = {}
    for file in weight_files(folder, allow_pickle=allow_pickle):
        tensors.update(_cached_digests(file))
    return digest_json({"version": VERSION, "config": output_bearing(read_config(folder)), "tensors": tensors})


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder}: no config.json; a folder written by `save_pretrained` was expected") from None
    except ValueError as error:
        raise ModelError(f"{folder}/config.json: not JSON: {error}") from error


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """The files with the weights, safetensors unless pickles are allowed and there is nothing else."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(folder.glob("*.bin"))
    if pickles and allow_pickle:
        return pickles
    if pickles:
        raise ModelError(
            f"{folder}: only pickled weights ({pickles[0].name}), which can run any code when loaded; convert them to "
            "safetensors, or pass --allow-pickle if you trust them"
        )
    raise ModelError(f"{folder}: no *.safetensors; a folder written by `save_pretrained` was expected")


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
            header = json.loads(stream.read(header_bytes))
        except ValueError as error:
            raise ModelError(f"{file}: not a safetensors file: {error}") from error
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
