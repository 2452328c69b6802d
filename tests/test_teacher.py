"""Teachers: architectures run right or are refused, and folders that are not whole say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from teachers import build_model, random_documents, save_teacher, token_block
from transformers import PreTrainedModel

from logitstore.errors import ModelError
from logitstore.producer import teacher as teacher_module
from logitstore.producer.packing import Windows
from logitstore.producer.scoring import Measures, score_block
from logitstore.producer.teacher import Head, Teacher, configured_vocabulary, context_length

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"num_local_experts": 4},
}


def _build(name: str) -> PreTrainedModel:
    return build_model(name.removesuffix("-tied"), **_ARCHITECTURES[name])


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_architecture_scores_as_its_own_forward_does(name: str, tmp_path: Path) -> None:
    model = _build(name)
    model.save_pretrained(tmp_path)
    # The reference: plain attention, one document at a time.
    model.set_attn_implementation("eager")
    documents = random_documents([20, 3, 31, 12], 97)
    expected = np.full((sum(map(len, documents)), 97), np.nan)
    begin = 0
    for document in documents:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([document[:-1]]), use_cache=False).logits[0]
        expected[begin + 1 : begin + len(document)] = logits.double().log_softmax(-1).numpy()
        begin += len(document)
    teacher = Teacher.load(tmp_path, dtype="fp32", device="cpu")
    tokens = token_block(documents)
    scored = score_block(teacher, tokens, np.zeros(4, np.uint64), Windows(64, 16), 80, Measures(policy=None))
    realised = expected[np.arange(tokens.num_tokens), tokens.ids]
    np.testing.assert_allclose(scored.scalars[:, 0], realised, atol=2e-4)
    np.testing.assert_allclose(scored.scalars[:, 4], -(np.exp(expected) * expected).sum(-1), atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere"])
def test_half_precision_passes_checks(name: str, dtype: torch.dtype) -> None:
    Teacher(_build(name).to(dtype), "half")


@pytest.mark.parametrize("name", ["cohere", "granite"])
def test_head_without_its_transform_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "__call__", lambda self, hidden: self.linear(hidden))
    with pytest.raises(ModelError, match="does not give its logits"):
        Teacher(_build(name), "broken")


def test_head_without_softcap_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("gemma2", head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=1.0)
    monkeypatch.setattr(Head, "__call__", lambda self, hidden: self.linear(hidden))
    with pytest.raises(ModelError, match="does not give its logits"):
        Teacher(model, "broken")


@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
def test_transform_of_head_refused_even_where_logits_are_small(initializer_range: float) -> None:
    model = build_model(initializer_range=initializer_range)
    forward = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.05
        return output

    model.forward = scaled
    with pytest.raises(ModelError, match="does not give its logits"):
        Teacher(model, "scaled")


@pytest.mark.parametrize("initializer_range", [0.02, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leak_between_packed_documents_refused(initializer_range: float, dtype: torch.dtype) -> None:
    model = build_model(initializer_range=initializer_range).to(dtype)
    forward = model.base_model.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        # An all-ones mask is how callers commonly lose the document boundaries.
        return forward(*args, **{**kwargs, "attention_mask": torch.ones_like(kwargs["input_ids"])})

    model.base_model.forward = leaking
    with pytest.raises(ModelError, match="packed documents see each other"):
        Teacher(model, "leaking")


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("mamba", {"state_size": 4, "conv_kernel": 4}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        # Its forward makes its masks without positions (seen with transformers 5.23).
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "sliding_window": 7}),
    ],
)
def test_architecture_that_cannot_be_packed_refused(architecture: str, config: dict[str, Any]) -> None:
    model = build_model(architecture, **config)
    with pytest.raises(ModelError, match=r"packed documents|see each other"):
        Teacher(model, architecture)


def test_teacher_without_all_its_tensors_refused(tmp_path: Path) -> None:
    save_teacher(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the model's tensors \(model\.layers\.1\.mlp\.up_proj\.weight"):
        Teacher.load(tmp_path, dtype="fp32", device="cpu")


def test_teacher_of_other_shape_than_its_configuration_refused(tmp_path: Path) -> None:
    save_teacher(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ModelError, match=f"{tmp_path}: cannot load the model"):
        Teacher.load(tmp_path, dtype="fp32", device="cpu")


def test_teacher_of_damaged_weights_refused(tmp_path: Path) -> None:
    save_teacher(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot load the model"):
        Teacher.load(tmp_path, dtype="fp32", device="cpu")


def test_tied_teacher_loads_though_its_head_is_not_saved(tmp_path: Path) -> None:
    save_teacher(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert Teacher.load(tmp_path, dtype="fp32", device="cpu").vocabulary_size == 97


def test_context_and_vocabulary_read_before_weights(tmp_path: Path) -> None:
    build_model("gpt2", n_embd=32, n_layer=1, n_head=2, max_position_embeddings=77).config.save_pretrained(tmp_path)
    assert context_length(tmp_path) == 77
    assert configured_vocabulary(tmp_path) == 97


def test_context_of_sparing_configuration_is_its_architectures_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 50}))
    assert context_length(tmp_path) == teacher_module.AutoConfig.for_model("mistral").max_position_embeddings


@pytest.mark.parametrize("text", [None, "{", '{"model_type": "no-such-model"}'])
def test_unreadable_configuration_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config"):
        configured_vocabulary(tmp_path)
