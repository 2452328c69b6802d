"""Students as they are loaded: whole, and computing what their configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import build_bytelevel_tokenizer
from safetensors.torch import load_file, save_file
from teachers import build_model, save_teacher

from logitstore.consumer.student import Student
from logitstore.errors import ModelError
from logitstore.tokenizer import Tokenizer

_GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7, "attn_logit_softcapping": 0.5}


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    return Path(build_bytelevel_tokenizer(tmp_path / "tokenizer"))


def _vocabulary(tokenizer_folder: Path) -> int:
    return Tokenizer.from_folder(tokenizer_folder).vocab_size


@pytest.mark.parametrize("begins", ["from weights", "at random"])
def test_student_keeps_the_softcap_of_its_attention(begins: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "student"
    size = _vocabulary(tokenizer_folder)
    save_teacher(folder, tokenizer_folder, architecture="gemma2", vocab_size=size, **_GEMMA2)
    if begins == "from weights":
        student = Student.load(str(folder))
    else:
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        student = Student.initialise(str(folder / "config.json"), tokenizer, None, seed=0)
    expected = build_model("gemma2", vocab_size=size, **_GEMMA2)
    expected.load_state_dict(student.model.state_dict())
    expected.set_attn_implementation("eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        found = student.model.eval()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, expected(input_ids=ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_student_without_all_its_tensors_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = save_teacher(tmp_path / "student", tokenizer_folder, vocab_size=_vocabulary(tokenizer_folder))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of the model's tensors \(model\.layers\.1\.mlp\.up_proj\.weight"):
        Student.load(str(folder))
