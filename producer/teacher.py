"""A teacher: a causal language model that is run for its logits only.

Hidden states and head are taken apart, so that float32 logits of a whole batch never exist. Whether the two together
are the model is checked at start-up, and so is that packed documents do not see each other.

Shapes: N tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from logitstore.attention import attention_implementation
from logitstore.errors import ModelError
from logitstore.heads import LogitTransform
from logitstore.producer.fingerprint import read_config, weight_files

_CHECK_TOKENS = 24


@dataclass(frozen=True)
class Head:
    """Hidden states to logits."""

    linear: torch.nn.Module
    transform: LogitTransform

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] in the model's own dtype."""
        logits_NV, softcap = self.linear(hidden_ND), self.transform.softcap
        if self.transform.scale != 1.0:
            logits_NV = logits_NV * self.transform.scale
        return logits_NV if softcap is None else torch.tanh(logits_NV / softcap) * softcap


class Teacher:
    """A loaded model, checked. ``vocabulary_size`` is the width of its head."""

    def __init__(self, model: PreTrainedModel, where: str) -> None:
        self._model = model.eval()
        self.where = where
        linear = model.get_output_embeddings()
        if linear is None:
            raise ModelError(
                f"{where}: {type(model).__name__} has no output embeddings: it is no causal language model"
            )
        self.head = Head(linear, LogitTransform.of_config(model.config.get_text_config()))
        self.device = model.device
        self.vocabulary_size = int(linear.weight.shape[0])
        try:
            self._check_head()
            self._check_packing()
        except (TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError, ValueError) as error:
            # Such as a forward that takes no position_ids.
            raise ModelError(
                f"{where}: {type(model).__name__} cannot be run on packed documents: {_first_line(error)}"
            ) from error

    @classmethod
    def load(
        cls, folder: Path, *, dtype: str, device: str, allow_pickle: bool = False, trust_code: bool = False
    ) -> Teacher:
        """Load a model folder.

        Args:
            folder: as ``save_pretrained`` writes it.
            dtype: ``bf16``, ``fp16`` or ``fp32``.
            device: ``cpu``, ``cuda``, ``cuda:1``, ...
            allow_pickle: load ``*.bin`` weights if there are no safetensors.
            trust_code: run the folder's own modelling code.

        Raises:
            ModelError: it cannot be loaded, or is not what its configuration says.
        """
        files = weight_files(folder, allow_pickle=allow_pickle)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch_dtype(dtype),
                use_safetensors=files[0].suffix == ".safetensors",
                attn_implementation=attention_implementation(read_config(folder)),
                trust_remote_code=trust_code,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers, safetensors and the model's own code raise
            raise ModelError(f"{folder}: cannot load the model: {_first_line(error)}") from error
        # transformers makes up what it misses, at random, with no more than a warning.
        model, report = loaded
        missing = sorted(map(str, report["missing_keys"]))
        if missing:
            raise ModelError(
                f"{folder}: its weights lack {len(missing)} of the model's tensors ({missing[0]}, ...): it was not "
                "saved whole, or its configuration is another model's"
            )
        return cls(model.to(device), str(folder))

    @torch.inference_mode()
    def hidden(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Final hidden states [N, D] of documents packed in one row; ``positions_N`` restarts with each."""
        # No attention mask and no cache: transformers then derives the document boundaries from the positions. With
        # its default cache, packed documents would see each other.
        output = self._model.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False)
        return output.last_hidden_state[0]

    @torch.inference_mode()
    def _check_head(self) -> None:
        ids = self._check_ids()
        expected = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        found = self.head(self.hidden(ids, torch.arange(len(ids), device=self.device))).float()
        if expected.shape != found.shape:
            raise ModelError(
                f"{self.where}: its logits have shape {tuple(expected.shape)}, its head applied to its hidden states "
                f"gives {tuple(found.shape)}"
            )
        # Relative to the spread of the logits: untrained models have small ones, and a wrong scale must show there too.
        difference = ((expected - found).abs().max() / expected.std().clamp(min=1e-30)).item()
        if difference > self._tolerance(1e-3, 0.05):
            raise ModelError(
                f"{self.where}: its head applied to its hidden states does not give its logits (off by up to "
                f"{difference:.3g} of their spread): this architecture does something after the head that logitstore "
                "does not know; please report it"
            )

    @torch.inference_mode()
    def _check_packing(self) -> None:
        ids = self._check_ids()
        half, positions = len(ids) // 2, torch.arange(len(ids), device=self.device)
        alone = self.hidden(ids[half:], positions[:half]).float()
        packed = self.hidden(ids, positions % half)[half:].float()
        joined = self.hidden(ids, positions)[half:].float()
        # Half-precision results differ between batch shapes, by what depends on the model; what a leak would do to this
        # one is seen by running the two documents as one.
        moved = ((packed - alone).norm(dim=-1) / (joined - alone).norm(dim=-1).clamp(min=1e-30)).max().item()
        if moved > self._tolerance(0.01, 0.3):
            raise ModelError(
                f"{self.where}: packed documents see each other (hidden states move {moved:.3g} times as far as in one "
                f"document): the attention of {type(self._model).__name__} cannot be packed"
            )

    def _tolerance(self, single: float, half: float) -> float:
        return single if self._model.dtype == torch.float32 else half

    def _check_ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            0, self._model.get_input_embeddings().weight.shape[0], (_CHECK_TOKENS,), generator=generator
        )
        return ids.to(self.device)


def context_length(folder: Path, *, trust_code: bool = False) -> int:
    """The longest sequence that a model's configuration allows."""
    config = _text_config(folder, trust_code)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 2048


def configured_vocabulary(folder: Path, *, trust_code: bool = False) -> int:
    """Vocabulary size in a model's configuration, before any weight is read."""
    return int(_text_config(folder, trust_code).vocab_size)


def torch_dtype(name: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def _text_config(folder: Path, trust_code: bool) -> Any:
    read_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_code).get_text_config()
    except Exception as error:  # transformers checks a configuration's values in many places
        raise ModelError(f"{folder}: cannot read its configuration: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
