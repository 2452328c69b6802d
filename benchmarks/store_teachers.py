"""Teachers of the store's benchmark: small Llamas over real vocabularies, trained until they are peaked.

    python benchmarks/store_teachers.py 131k --minutes 30

What decides what a signal costs is how peaked a teacher is and how its candidates lie in a real vocabulary, neither of
which random logits have. Small teachers become peaked on little text: after some epochs over all of it they learn some
by heart; how far they got is written beside the weights. The schedule follows the clock, so that a slow machine trains
less and still ends well. The softmax runs over all tokens of the text and a fresh sample of the others, weighted
to stand for all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from store_corpus import VOCABULARIES, load_corpus, load_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

BUILD = Path("build/bench-store")
_HISTORY = "training.json"
SEQUENCE = 512
_SIZES = {
    "32k": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "131k": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4},
}
_SAMPLED_TOKENS = 4096
_MATRIX_LR, _EMBEDDING_LR = 0.02, 4e-3
_WARMUP_STEPS, _DECAY_FROM = 20, 0.5


class Stage(NamedTuple):
    """Share of the time; one part of how many of the text, from its beginning; tokens of a batch."""

    share: float
    parts: int
    batch: int


_STAGES = {"broad": Stage(0.7, 1, 2048), "narrow": Stage(0.3, 8, 1024)}


_CHECKPOINT_SECONDS = 150


def teacher_folder(vocabulary: str, build: Path = BUILD) -> Path:
    return build / f"teacher-{vocabulary}"


def ensure_teacher(vocabulary: str, minutes: float, build: Path = BUILD) -> LlamaForCausalLM:
    """The cached teacher, whole or as far as it was trained, or one trained now."""
    if not teacher_history(vocabulary, build):
        train(vocabulary, minutes, build)
    return LlamaForCausalLM.from_pretrained(teacher_folder(vocabulary, build), dtype=torch.float32).eval()


def teacher_history(vocabulary: str, build: Path = BUILD) -> list[dict[str, Any]]:
    """Of each stage: its name, tokens of its text, steps, epochs, loss, minutes, and whether it is complete."""
    path = teacher_folder(vocabulary, build) / _HISTORY
    return json.loads(path.read_text()) if path.exists() else []


def train(vocabulary: str, minutes: float, build: Path = BUILD) -> None:
    """Train a teacher for that long, or what a killed run left to do; checkpoints replace one another."""
    torch.manual_seed(1)
    corpus, (_, num_tokens) = load_corpus(vocabulary), load_tokenizer(vocabulary)
    history = teacher_history(vocabulary, build)
    model = ensure_teacher(vocabulary, minutes, build).train() if history else _initial_model(vocabulary, num_tokens)
    stream = np.concatenate(corpus.training)
    for name, stage in _STAGES.items():
        done = [past for past in history if past["stage"] != name]
        if len(done) == len(history) or not history[len(done)]["complete"]:
            mine = stream[: len(stream) // stage.parts]
            loss_of = SampledSoftmax(torch.from_numpy(np.unique(mine)).long(), num_tokens)
            for current in _train_stage(model, mine, loss_of, stage.share * minutes, stage.batch):
                history = [*done, {"stage": name, "training_tokens": len(mine), **current}]
                _save(model, teacher_folder(vocabulary, build), history)


def _train_stage(
    model: LlamaForCausalLM, stream: np.ndarray, loss_of: SampledSoftmax, minutes: float, batch: int
) -> Iterator[dict[str, Any]]:
    """Yields how far it is whenever a checkpoint is due, and at the end."""
    optimisers = _optimisers(model)
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    began = saved = time.monotonic()
    mean_loss = 0.0
    for step, windows in enumerate(_windows(stream, batch // SEQUENCE)):
        elapsed = (time.monotonic() - began) / (60 * minutes)
        progress = {
            "steps": step,
            "epochs": round(step * batch / len(stream), 2),
            "loss_nats": round(mean_loss, 3),
            "minutes": round(elapsed * minutes, 1),
            "complete": elapsed >= 1,
        }
        if step and step % 20 == 0:
            print(progress, flush=True)
        if elapsed >= 1:
            yield progress
            return
        if time.monotonic() - saved > _CHECKPOINT_SECONDS:
            yield progress
            saved = time.monotonic()
        factor = min((step + 1) / _WARMUP_STEPS, (1 - elapsed) / (1 - _DECAY_FROM), 1.0)
        for optimiser, peak in zip(optimisers, peaks, strict=True):
            for group, lr in zip(optimiser.param_groups, peak, strict=True):
                group["lr"] = lr * factor
        loss = _step(model, windows, loss_of, optimisers)
        mean_loss += (loss - mean_loss) / min(step + 1, 20)


def _step(
    model: LlamaForCausalLM, windows: Tensor, loss_of: SampledSoftmax, optimisers: list[torch.optim.Optimizer]
) -> float:
    hidden = model.model(windows[:, :-1], use_cache=False).last_hidden_state
    loss = loss_of(hidden.flatten(0, 1), model.get_input_embeddings().weight, windows[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()
    return loss.item()


class SampledSoftmax:
    """Cross-entropy over the tokens of a text and a sample of all others, each of which stands for many."""

    def __init__(self, used: Tensor, num_tokens: int) -> None:
        """``used``: int64, ids that are always in the sum."""
        rare = torch.ones(num_tokens, dtype=torch.bool)
        rare[used] = False
        self._rare = rare.nonzero()[:, 0]
        self._used = used
        self._place = torch.empty(num_tokens, dtype=torch.int64)
        self._place[used] = torch.arange(len(used))

    def __call__(self, hidden_RD: Tensor, head_VD: Tensor, target_R: Tensor) -> Tensor:
        """Mean loss, nats; targets are among the used tokens."""
        num_sampled = min(_SAMPLED_TOKENS, len(self._rare))
        sampled = self._rare[torch.randperm(len(self._rare))[:num_sampled]]
        bias = torch.zeros(len(self._used) + num_sampled)
        bias[len(self._used) :] = math.log(len(self._rare) / max(1, num_sampled))
        logits = torch.addmm(bias, hidden_RD, head_VD[torch.cat([self._used, sampled])].T)
        return nn.functional.cross_entropy(logits, self._place[target_R])


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five Newton-Schulz steps (Jordan et al. 2024); float32, as CPUs like it."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad)
                update = _orthogonal(parameter.grad + 0.95 * momentum)
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - 0.01 * group["lr"]).add_(update, alpha=-group["lr"] * scale)


def _orthogonal(matrix: Tensor) -> Tensor:
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def _optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    embedding = model.get_input_embeddings().weight
    others = [parameter for parameter in model.parameters() if parameter is not embedding]
    matrices, vectors = [p for p in others if p.dim() == 2], [p for p in others if p.dim() == 1]
    adam = torch.optim.AdamW([embedding, *vectors], lr=_EMBEDDING_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [adam, Muon(matrices, _MATRIX_LR)]


def _initial_model(vocabulary: str, num_tokens: int) -> LlamaForCausalLM:
    sizes = _SIZES[vocabulary]
    config = LlamaConfig(
        vocab_size=num_tokens,
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.normal_(0, 0.05)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model


def _windows(stream: np.ndarray, num_each: int) -> Iterator[Tensor]:
    """int64 [num_each, SEQUENCE + 1], epoch after epoch, each cut at its own offset."""
    rng = np.random.default_rng(1)
    while True:
        begins = np.arange(rng.integers(SEQUENCE), len(stream) - SEQUENCE, SEQUENCE)
        rng.shuffle(begins)
        for chosen in begins[: len(begins) // num_each * num_each].reshape(-1, num_each):
            yield torch.from_numpy(stream[chosen[:, None] + np.arange(SEQUENCE + 1)]).long()


def _save(model: LlamaForCausalLM, folder: Path, history: list[dict[str, Any]]) -> None:
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    (fresh / _HISTORY).write_text(json.dumps(history, indent=1) + "\n")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vocabulary", choices=VOCABULARIES)
    parser.add_argument("--minutes", type=float, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.vocabulary, arguments.minutes)


if __name__ == "__main__":
    main()
