"""Where a model or tokenizer comes from: a local folder, or a hub id that is downloaded into the hub's own cache."""

from __future__ import annotations

from pathlib import Path

from logitstore.errors import ModelError
from logitstore.tokenizer import Tokenizer

# Modelling code is fetched too, but run by none but those who are told to trust it.
_FILES = ["*.json", "*.jinja", "*.py", "*.safetensors", "*.model", "*.model.*", "*.tiktoken"]
_TOKENIZER_FILES = [
    "tokenizer*",
    "tekken*.json",
    "*.model",
    "*.model.*",
    "*.tiktoken",
    "special_tokens_map.json",
    "*.jinja",
    "config.json",
]


def resolve_folder(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, pickle: bool = False
) -> Path:
    """The local folder of a model: ``model`` itself, or a snapshot of the hub id ``model`` at ``revision``.

    Raises:
        ModelError: neither a folder nor a hub id that can be had.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"{model}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = _TOKENIZER_FILES if tokenizer_only else [*_FILES, *(["*.bin"] if pickle else [])]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{model}: neither a local folder nor a model that the hub has for you: {reason}") from error


def split_model(text: str) -> tuple[str, str | None]:
    """``MODEL[@REVISION]`` as (model, revision); a path that exists is never split."""
    if Path(text).expanduser().exists() or "@" not in text:
        return text, None
    model, revision = text.rsplit("@", 1)
    return model, revision


def load_tokenizer(text: str, chat_template: str | None = None) -> Tokenizer:
    """``TOKENIZER[@REVISION]``: a folder, a file in one, or a hub id.

    Args:
        text: which.
        chat_template: to take instead of its own.

    Raises:
        ModelError: neither a path nor a hub id that can be had.
        TokenizerError: it cannot be read.
    """
    model, revision = split_model(text)
    return Tokenizer.from_folder(str(resolve_folder(model, revision, tokenizer_only=True)), chat_template)
