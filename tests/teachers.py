"""Tiny teachers of many architectures, in memory or as folders, and blocks of random tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from logitstore.token_parts import TokenBlock

disable_progress_bar()

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large weights: what an untrained model says would otherwise hardly depend on what it has read.
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build_model(architecture: str = "llama", vocab_size: int = 97, seed: int = 0, **config: Any) -> PreTrainedModel:
    """A model of random weights, the same for the same seed; ``config`` goes to its configuration."""
    torch.manual_seed(seed)
    values = {**_SHAPE, "vocab_size": vocab_size, **config}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**values), dtype=torch.float32).eval()


def save_teacher(folder: Path, tokenizer_folder: str | Path | None = None, **model: Any) -> Path:
    """``build_model`` saved as an ordinary folder, with a copy of a tokenizer's files in it."""
    build_model(**model).save_pretrained(folder)
    if tokenizer_folder is not None:
        for file in Path(tokenizer_folder).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def token_block(documents: Sequence[Sequence[int]]) -> TokenBlock:
    """Documents given by their ids, each token a byte long."""
    ids = np.array([token for document in documents for token in document], np.int32)
    ends = np.cumsum([len(document) for document in documents]).astype(np.int64)
    return TokenBlock(ids, np.ones(len(ids), np.int32), ends, np.ones(len(documents), bool))


def random_documents(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]
