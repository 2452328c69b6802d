"""The demo's two tokenizers: a ByteLevel BPE as GPT-2's and Llama 3's, and a byte-fallback BPE as Llama 2's."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"


def train_bytelevel_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    """Every byte is a token; merges stay within GPT-2's words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _save(tokenizer, folder)


def train_metaspace_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    """Spaces are spelled and belong to the word after them; digits stand alone; rare characters fall back to bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    words = Regex(r"▁+(?=▁)|\n+|▁?[0-9]|▁?[A-Za-z_]+|▁?[^▁\nA-Za-z_0-9]+|▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, "<unk>", *byte_tokens],
        initial_alphabet=["\n", "▁", *map(chr, range(32, 127))],
        limit_alphabet=200,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document = json.loads(tokenizer.to_str())
    # The trainer keeps byte tokens only if it is given them as special ones; they are ordinary tokens.
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in byte_tokens]
    _save(Tokenizer.from_str(json.dumps(document)), folder)


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
