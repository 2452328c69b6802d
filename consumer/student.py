"""The model that is trained: a folder, a hub id, or a configuration to begin from at random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from logitstore.consumer.batches import Batch
from logitstore.errors import ConfigError, ModelError, TokenizerError
from logitstore.heads import LogitTransform
from logitstore.hub import resolve_folder, split_model
from logitstore.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")


@dataclass
class Student:
    """A causal language model, taken apart into hidden states and head, so that its logits never exist whole."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    transform: LogitTransform
    tokenizer_folder: Path | None = None
    """Where the tokenizer's own files are; without one, they are written anew."""

    @classmethod
    def load(cls, model: str, *, trust_code: bool = False) -> Student:
        """A pretrained student with its own tokenizer, ``MODEL[@REVISION]``.

        Raises:
            ModelError: it cannot be loaded.
            TokenizerError: the tokenizer has ids that the model does not.
        """
        name, revision = split_model(model)
        folder = resolve_folder(name, revision)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation="sdpa",
                trust_remote_code=trust_code,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"{folder}: cannot load the student: {str(error).splitlines()[0]}") from error
        return cls._of(loaded, Tokenizer.from_folder(str(folder)), folder, str(folder))

    @classmethod
    def initialise(cls, config_file: str, tokenizer: Tokenizer, tokenizer_folder: Path | None, seed: int) -> Student:
        """A student of random weights, the same for the same seed.

        Raises:
            ConfigError: the file is not a configuration.
            TokenizerError: the tokenizer has ids that the model does not.
        """
        try:
            values = json.loads(Path(config_file).read_text())
            config = AutoConfig.for_model(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"--student-config {config_file}: not a model configuration: {error}") from error
        with _seeded(seed):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        return cls._of(model, tokenizer, tokenizer_folder, config_file)

    @classmethod
    def _of(cls, model: PreTrainedModel, tokenizer: Tokenizer, tokenizer_folder: Path | None, where: str) -> Student:
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if tokenizer.vocab_size > vocabulary:
            raise TokenizerError(
                f"{where}: its tokenizer has {tokenizer.vocab_size} tokens, the student only {vocabulary}: enlarge "
                "vocab_size in its configuration, or use the tokenizer that belongs to it"
            )
        return cls(model, tokenizer, LogitTransform.of_config(model.config.get_text_config()), tokenizer_folder)

    def hidden(self, batch: Batch) -> Tensor:
        """[N, D]: the hidden states that predict the batch's charged tokens."""
        # Without mask and cache, transformers derives document boundaries from the positions.
        output = self.model.base_model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[batch.outputs]

    @property
    def head(self) -> Tensor:
        """[V, D]."""
        return self.model.get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self.model.get_output_embeddings(), "bias", None)

    def save(self, folder: Path) -> None:
        """An ordinary ``save_pretrained`` folder, with the tokenizer."""
        self.model.save_pretrained(folder)
        if self.tokenizer_folder is None:
            self.tokenizer.save(folder)
            return
        for pattern in _TOKENIZER_FILES:
            for file in self.tokenizer_folder.glob(pattern):
                shutil.copyfile(file, folder / file.name)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
