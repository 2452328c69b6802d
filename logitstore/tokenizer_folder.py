"""What a saved tokenizer's folder says: tokenizer.json, the special tokens by name, and the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitstore.errors import TokenizerError


@dataclass(frozen=True)
class TokenizerFolder:
    """The files of a tokenizer, read."""

    tokenizer_json: dict[str, Any]
    special_tokens: dict[str, str]
    """Spelling by name: ``{"bos_token": "<s>", "eos_token": "</s>", ...}``."""
    add_bos_token: bool
    """The configuration asks for BOS, whatever the post-processor does."""
    chat_template: str | None


def read_tokenizer_folder(path: str | Path) -> TokenizerFolder:
    """Read a folder as ``save_pretrained`` leaves it, or a ``tokenizer.json`` with what stands beside it.

    Raises:
        TokenizerError: there is no ``tokenizer.json``, or a file is not JSON.
    """
    given = Path(path).expanduser()
    file = given if given.is_file() else given / "tokenizer.json"
    folder = file.parent
    if not file.is_file():
        raise TokenizerError(
            f"{path}: no tokenizer.json there: make one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    config = _read_json(folder / "tokenizer_config.json")
    return TokenizerFolder(
        tokenizer_json=_read_json(file),
        special_tokens=_special_tokens({**_read_json(folder / "special_tokens_map.json"), **config}),
        add_bos_token=config.get("add_bos_token") is True,
        chat_template=_chat_template(folder, config),
    )


def write_tokenizer_folder(path: Path, tokenizer: TokenizerFolder) -> None:
    """Write a folder that ``read_tokenizer_folder`` and transformers read."""
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.add_bos_token:
        config["add_bos_token"] = True
    (path / "tokenizer.json").write_text(json.dumps(tokenizer.tokenizer_json, ensure_ascii=False), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if tokenizer.chat_template is not None:
        (path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{file}: cannot be read as JSON: {error}; save the tokenizer again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: expected a JSON object, found {type(value).__name__}; save the tokenizer again")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Entries named ``*_token``: strings, or objects with their content (``AddedToken``)."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template
