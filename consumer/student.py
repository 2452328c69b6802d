"""The model that is trained: a folder, a hub id, or a configuration to begin from at random."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from logitstore.attention import attention_implementation
from logitstore.consumer.batches import Batch
from logitstore.errors import ConfigError, ModelError, StorageError, TokenizerError
from logitstore.heads import LogitTransform
from logitstore.hub import resolve_folder, split_model
from logitstore.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")
_CHECK_TOKENS = 24


@dataclass
class Student:
    """A causal language model, taken apart into hidden states and head, so that its logits never exist whole."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    transform: LogitTransform
    tokenizer_folder: Path | None = None
    """Where the tokenizer's own files are; without one, they are written anew."""
    chat_template: str | None = None
    """Jinja text that was given instead of the tokenizer's own."""

    @classmethod
    def load(cls, model: str, *, trust_code: bool = False, chat_template: str | None = None) -> Student:
        """A pretrained student with its own tokenizer, ``MODEL[@REVISION]``.

        Args:
            model: folder or hub id.
            trust_code: run the folder's own modelling code.
            chat_template: Jinja text to take instead of the tokenizer's own.

        Raises:
            ModelError: it cannot be loaded whole, or its logits are not its head's output on its hidden states.
            TokenizerError: the tokenizer has ids that the model does not.
        """
        name, revision = split_model(model)
        folder = resolve_folder(name, revision)
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: no config.json there: expected a model folder as save_pretrained writes it")
        tokenizer = Tokenizer.from_folder(str(folder), chat_template)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation=attention_implementation(json.loads((folder / "config.json").read_text())),
                trust_remote_code=trust_code,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers, safetensors and the model's own code raise
            raise ModelError(f"{folder}: cannot load the student: {_reason(error)}") from error
        # transformers makes up what it misses, at random, with no more than a warning.
        loaded_model, report = loaded
        missing = sorted(map(str, report["missing_keys"]))
        if missing:
            raise ModelError(
                f"{folder}: its weights lack {len(missing)} of the model's tensors ({missing[0]}, ...): it was not "
                "saved whole, or its configuration is another model's; --student-config begins at random"
            )
        return cls._of(loaded_model, tokenizer, folder, str(folder), chat_template)

    @classmethod
    def initialise(
        cls,
        config_file: str,
        tokenizer: Tokenizer,
        tokenizer_folder: Path | None,
        seed: int,
        chat_template: str | None = None,
    ) -> Student:
        """A student of random weights, the same for the same seed.

        Raises:
            ConfigError: the file is not a configuration.
            TokenizerError: the tokenizer has ids that the model does not.
        """
        try:
            values = json.loads(Path(config_file).expanduser().read_text())
            if not isinstance(values, dict) or "model_type" not in values:
                raise ValueError('it says no "model_type"')
            config = AutoConfig.for_model(**values)
            with _seeded(seed):
                attention = attention_implementation(values)
                model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        except Exception as error:  # transformers checks a configuration's values in many places
            raise ConfigError(
                f"--student-config {config_file}: not a usable model configuration: {_reason(error)}"
            ) from error
        return cls._of(model, tokenizer, tokenizer_folder, config_file, chat_template)

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: Tokenizer) -> Student:
        """A model that is at hand, on whatever device and of whatever dtype.

        Raises:
            ModelError: its logits are not its head's output on its hidden states, or its attention cannot be packed.
            TokenizerError: the tokenizer has ids that the model does not.
        """
        return cls._of(model, tokenizer, None, type(model).__name__, None)

    @classmethod
    def _of(
        cls,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        tokenizer_folder: Path | None,
        where: str,
        chat_template: str | None,
    ) -> Student:
        if model.get_output_embeddings() is None:
            raise ModelError(f"{where}: it has no head over a vocabulary: expected a causal language model")
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if tokenizer.vocab_size > vocabulary:
            raise TokenizerError(
                f"{where}: its tokenizer has {tokenizer.vocab_size} tokens, the student only {vocabulary}: enlarge "
                "vocab_size in its configuration, or use the tokenizer that belongs to it"
            )
        transform = LogitTransform.of_config(model.config.get_text_config())
        student = cls(model, tokenizer, transform, tokenizer_folder, chat_template)
        student._check(where)
        return student

    def hidden(self, batch: Batch) -> Tensor:
        """[N, D]: the hidden states that predict the batch's charged tokens."""
        return self._hidden(batch.input_ids, batch.position_ids).flatten(0, 1)[batch.outputs]

    def _hidden(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[B, L, D]."""
        # Without mask and cache, transformers derives document boundaries from the positions.
        return self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state

    @property
    def head(self) -> Tensor:
        """[V, D]."""
        return self.model.get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:
        return getattr(self.model.get_output_embeddings(), "bias", None)

    @property
    def num_positions(self) -> int:
        """The longest sequence that the student's configuration allows; no bound if it names none."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize

    def check_length(self, sequence_length: int) -> None:
        """Refuse sequences longer than the student has positions for.

        Raises:
            ConfigError: they are.
        """
        if sequence_length > self.num_positions:
            raise ConfigError(
                f"--seq-length {sequence_length}: the student has {self.num_positions} positions "
                "(max_position_embeddings)"
            )

    @torch.no_grad()
    def _check(self, where: str) -> None:
        """That head and hidden states are the model, and that packed documents do not see each other."""
        training = self.model.training
        self.model.eval()
        ids = torch.arange(2, 2 + _CHECK_TOKENS, device=self.head.device)[None] % self.head.shape[0]
        positions = torch.arange(_CHECK_TOKENS // 2, device=self.head.device)[None]
        alone = [self._logits(half, positions) for half in ids.split(_CHECK_TOKENS // 2, 1)]
        whole = self.model(input_ids=ids[:, : _CHECK_TOKENS // 2], use_cache=False).logits
        packed = self._logits(ids, positions.repeat(1, 2))
        self.model.train(training)
        tolerance = max(1e-3, 8 * torch.finfo(whole.dtype).eps)
        if whole.shape != alone[0].shape or not torch.allclose(whole, alone[0], rtol=tolerance, atol=tolerance):
            raise ModelError(
                f"{where}: its head applied to its hidden states does not give its logits: this architecture does "
                "something after the head that logitstore does not know; please report it"
            )
        if not torch.allclose(packed, torch.cat(alone, 1), rtol=tolerance, atol=tolerance):
            raise ModelError(
                f"{where}: packed documents see each other; this architecture's attention cannot be packed with its "
                "SDPA implementation"
            )

    def _logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[B, L, V], as the loss forms them."""
        logits = self._hidden(input_ids, position_ids) @ self.head.T
        if self.head_bias is not None:
            logits = logits + self.head_bias
        logits, softcap = logits * self.transform.scale, self.transform.softcap
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def save(self, folder: Path) -> None:
        """An ordinary ``save_pretrained`` folder, with the tokenizer.

        Raises:
            StorageError: the disk is full, say.
        """
        try:
            self.model.save_pretrained(folder)
            self._save_tokenizer(folder)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{folder}: cannot save the student ({_reason(error)}); its last checkpoint is whole: make room and "
                "run the same command again"
            ) from error

    def _save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer_folder is None:
            self.tokenizer.save(folder)
            return
        for pattern in _TOKENIZER_FILES:
            for file in self.tokenizer_folder.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def _reason(error: Exception) -> str:
    """An error's message in one line, or its kind where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
