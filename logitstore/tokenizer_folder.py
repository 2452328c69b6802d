"""What a tokenizer's files say: tokenizer.json or what becomes one, special tokens by name, and the chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitstore.errors import TokenizerError
from logitstore.rank_files import TEKKEN_NAMES, convert_tekken, convert_tiktoken, is_tekken, is_tiktoken
from logitstore.sentencepiece_files import convert_sentencepiece, parse_sentencepiece


@dataclass(frozen=True)
class TokenizerFolder:
    """The files of a tokenizer, read."""

    tokenizer_json: dict[str, Any]
    special_tokens: dict[str, str]
    """Spelling by name: ``{"bos_token": "<s>", "eos_token": "</s>", ...}``."""
    add_bos_token: bool
    """The configuration asks for BOS, whatever the post-processor does."""
    chat_template: str | None


_PATTERNS = (
    *("tokenizer.json", "tekken.json", "tekken_*.json", "*.tiktoken"),
    *("tokenizer.model", "*.model", "*.model.*"),
)
"""Files that tell how text is cut, the first that a folder has."""


def read_tokenizer_folder(path: str | Path) -> TokenizerFolder:
    """Read a folder as ``save_pretrained`` leaves it, or one file of a tokenizer with what stands beside it.

    It may be a ``tokenizer.json``, a SentencePiece model, a tekken vocabulary or a file of byte ranks (tiktoken); all
    but the first are converted.

    Raises:
        TokenizerError: there is no such file, or it cannot be read.
    """
    given = Path(path).expanduser()
    file = given if given.is_file() else _find_file(given)
    folder = file.parent
    config = _read_json(folder / "tokenizer_config.json")
    named = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
    tokenizer_json, own, adds_bos = _read_file(file, config)
    return TokenizerFolder(
        tokenizer_json=tokenizer_json,
        special_tokens={**own, **named},
        add_bos_token=bool(config.get("add_bos_token", adds_bos)),
        chat_template=_chat_template(folder, config),
    )


def read_loaded_tokenizer(loaded: Any) -> TokenizerFolder:
    """What ``read_tokenizer_folder`` would find of a ``tokenizers.Tokenizer`` or a fast tokenizer of transformers.

    Raises:
        TokenizerError: it is neither.
    """
    fast = getattr(loaded, "backend_tokenizer", loaded)
    if not hasattr(fast, "to_str"):
        raise TokenizerError(
            f"expected a tokenizers.Tokenizer or a fast tokenizer of transformers, found {type(loaded).__name__}: "
            "load it with AutoTokenizer.from_pretrained(...), or give its folder to Tokenizer.from_folder"
        )
    template = getattr(loaded, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerFolder(
        tokenizer_json=json.loads(fast.to_str()),
        special_tokens=_special_tokens(dict(getattr(loaded, "special_tokens_map", None) or {})),
        add_bos_token=getattr(loaded, "add_bos_token", None) is True,
        chat_template=template,
    )


def _find_file(folder: Path) -> Path:
    for pattern in _PATTERNS:
        found = sorted(folder.glob(pattern)) if folder.is_dir() else []
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise TokenizerError(f"{folder}: expected one tokenizer, found {names}: name one of these files")
        if found:
            return found[0]
    raise TokenizerError(
        f"{folder}: no tokenizer.json there, nor tekken.json, *.tiktoken or tokenizer.model: make one with "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _read_file(file: Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str], bool]:
    """(tokenizer.json, special tokens by name, whether texts begin with BOS if the configuration does not say)."""
    if file.suffix == ".json":
        content = _read_json(file)
        if not is_tekken(content):
            return content, {}, False
        return convert_tekken(content, str(file)), TEKKEN_NAMES, True
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read: {error}") from error
    if is_tiktoken(data):
        return convert_tiktoken(data, config, str(file)), {}, False
    model = parse_sentencepiece(data, str(file))
    return convert_sentencepiece(model), model.special_tokens, "bos_token" in model.special_tokens


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
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template
