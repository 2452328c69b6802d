"""Files of byte ranks (tekken.json, *.tiktoken) as a tokenizer.json.

Such a file lists tokens as bytes; of two neighbours those are joined first whose bytes together have the lowest rank.
A tokenizer.json lists pairs instead: every way to cut a token into two others, in the order of its rank.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from logitstore.errors import TokenizerError
from logitstore.vocabulary import spell_bytes

_PATTERN_KEYS = ("pat_str", "pattern")

# Tekken files up to version 7 leave these to the reader.
_TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)

TEKKEN_NAMES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def is_tekken(content: Mapping[str, Any]) -> bool:
    """Whether a parsed JSON file is a tekken vocabulary."""
    return isinstance(content.get("vocab"), list) and "pattern" in content.get("config", {})


def convert_tekken(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A parsed tekken.json as a tokenizer.json: special tokens first, then the bytes by rank.

    Raises:
        TokenizerError: the file says less than a tokenizer needs.
    """
    try:
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        kept = content["vocab"][: int(config["default_vocab_size"]) - num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): num_special + int(entry["rank"]) for entry in kept}
        listed = content.get("special_tokens")
        named = dict(enumerate(_TEKKEN_SPECIALS)) if listed is None else {e["rank"]: e["token_str"] for e in listed}
        pattern = config["pattern"]
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{where}: expected a tekken vocabulary, but {type(error).__name__}: {error}; fetch the file again"
        ) from error
    special = {index: {"content": named.get(index, f"<SPECIAL_{index}>")} for index in range(num_special)}
    return convert_ranks(ranks, pattern, special, where)


def is_tiktoken(data: bytes) -> bool:
    """Whether a file's content is lines of base64 and rank."""
    parts = data[:4096].split(b"\n", 1)[0].split()
    return len(parts) == 2 and parts[1].isdigit()


def convert_tiktoken(data: bytes, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file of lines "base64 rank" as a tokenizer.json.

    Args:
        data: the file's content.
        config: ``tokenizer_config.json`` beside it: the split pattern under ``pat_str``, and ``added_tokens_decoder``.
        where: the file, for errors.

    Raises:
        TokenizerError: a line is no rank, or the configuration has no pattern.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"{where}: line {number}: expected base64 and a rank, found {line[:40]!r}; fetch the file again"
            ) from error
    pattern = next((config[key] for key in _PATTERN_KEYS if isinstance(config.get(key), str)), None)
    if pattern is None:
        raise TokenizerError(
            f"{where}: expected the pattern that splits texts under pat_str in tokenizer_config.json beside it, found "
            "none; add it there (the model's own tokenizer code has it), or save a tokenizer.json with transformers"
        )
    added = {int(index): dict(entry) for index, entry in (config.get("added_tokens_decoder") or {}).items()}
    return convert_ranks(ranks, pattern, added, where)


def convert_ranks(
    ranks: Mapping[bytes, int], pattern: str, added: Mapping[int, Mapping[str, Any]], where: str
) -> dict[str, Any]:
    """Byte ranks as a tokenizer.json.

    Args:
        ranks: token id by bytes, in the order in which tokens are joined.
        pattern: splits a text; tokens do not cross its matches.
        added: added tokens by id: ``content``, and ``special`` (true if not said), ``lstrip``, ``rstrip``.
        where: the file, for errors.
    """
    vocabulary = {spell_bytes(token): index for token, index in ranks.items()}
    spelled = {token: spell_bytes(token) for token in ranks}
    merges = [[spelled[left], spelled[right]] for left, right in _merges(ranks)]
    for index, entry in added.items():
        if vocabulary.setdefault(entry["content"], index) != index:
            raise TokenizerError(
                f"{where}: added token {entry['content']!r} has id {index}, and id {vocabulary[entry['content']]} is "
                "spelled like it: it cannot be written as a tokenizer.json"
            )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytelevel = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [added_token(index, **entry) for index, entry in sorted(added.items())],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytelevel]},
        "post_processor": None,
        "decoder": bytelevel,
        "model": bpe_model(vocabulary, merges, ignore_merges=True),
    }


def bpe_model(vocabulary: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """The ``model`` of a tokenizer.json."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocabulary),
        "merges": merges,
        **options,
    }


def added_token(index: int, content: str, **flags: Any) -> dict[str, Any]:
    """An entry of ``added_tokens``; special and matched before normalising unless the flags say otherwise."""
    token = {"id": index, "content": content, "special": True}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return token | {name: value for name, value in flags.items() if name in token}


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """All ways to join two tokens to a third, in the order of the third."""
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
