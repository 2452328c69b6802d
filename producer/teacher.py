"""A teacher: a causal language model that is run for its logits only.

Hidden states and head are taken apart, so that float32 logits of a whole batch never exist. Whether the two together
are the model is checked at start-up, and so is that packed documents do not see each other.

Shapes: N tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
        self.head = Head(model.get_output_embeddings(), LogitTransform.of_config(model.config.get_text_config()))
        self.device = model.device
        self.vocabulary_size = int(model.get_output_embeddings().weight.shape[0])
        self._check_head()
        self._check_packing()

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
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch_dtype(dtype),
                use_safetensors=files[0].suffix == ".safetensors",
                attn_implementation="sdpa",
                trust_remote_code=trust_code,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"{folder}: cannot load the model: {str(error).splitlines()[0]}") from error
        return cls(model.to(device), str(folder))  # type: ignore[arg-type]

    @torch.inference_mode()
    def hidden(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Final hidden states [N, D] of documents packed in one row; ``positions_N`` restarts with each."""
        # No attention mask and no cache: transformers then derives the document boundaries from the positions. With
        # its default cache, packed documents would see each other.
        output = self._model.base_model(input_ids=ids_N[None], position_ids=positions_N[None], use_cache=False)
        return output.last_hidden_state[0]

    def _check_head(self) -> None:
        ids = self._check_ids()
        with torch.inference_mode():
            expected = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
            found = self.head(self.hidden(ids, torch.arange(len(ids), device=self.device))).float()
        if expected.shape != found.shape or not torch.allclose(expected, found, rtol=0.02, atol=0.02, equal_nan=True):
            raise ModelError(
                f"{self.where}: its head applied to its hidden states does not give its logits (off by up to "
                f"{_largest_difference(expected, found):.3g}): this architecture does something after the head that "
                "logitstore does not know; please report it"
            )

    def _check_packing(self) -> None:
        ids = self._check_ids()
        half = len(ids) // 2
        positions = torch.arange(half, device=self.device)
        alone = torch.cat([self.hidden(ids[:half], positions), self.hidden(ids[half:], positions)])
        packed = self.hidden(ids, positions.repeat(2))
        with torch.inference_mode():
            expected, found = self.head(alone).float().log_softmax(-1), self.head(packed).float().log_softmax(-1)
        # Half-precision logits differ a little between batch shapes; a leak between documents changes everything.
        tolerance = 1e-3 if self._model.dtype == torch.float32 else 0.1
        difference = (expected - found).exp().sub(1).mul(expected.exp()).abs().sum(-1).max().item()
        if difference > tolerance:
            raise ModelError(
                f"{self.where}: packed documents see each other (probabilities move by {difference:.3g}); this "
                "architecture's attention cannot be packed with its SDPA implementation"
            )

    def _check_ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            0, self._model.get_input_embeddings().weight.shape[0], (_CHECK_TOKENS,), generator=generator
        )
        return ids.to(self.device)


def context_length(folder: Path) -> int:
    """The longest sequence that a model's configuration allows."""
    config = read_config(folder)
    text = config.get("text_config", config)
    length = text.get("max_position_embeddings") or text.get("n_positions") or text.get("max_seq_len")
    return int(length or 2048)


def configured_vocabulary(folder: Path) -> int:
    """Vocabulary size in a model's configuration, before any weight is read."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: cannot read its configuration: {str(error).splitlines()[0]}") from error
    return int(config.get_text_config().vocab_size)


def torch_dtype(name: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item() if a.shape == b.shape else float("inf")
