"""What scoring and training cost beside the bare model, on this machine's device: ratios of runs taken in turn.

    scoring    produce's path (packed forward, head, selection) against the packed base model alone, and against full
               logits with log_softmax and topk
    training   a student's step with distillation against the same step with cross-entropy
    check      the device's rows against those of a float32 model on the CPU

Prints a table last. ``--dry-run`` takes sizes that any CPU finishes in a minute.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from logitstore.consumer.primitive import head_outputs
from logitstore.producer.packing import PackedBatch, Windows, pack
from logitstore.producer.scoring import Measures, score_block
from logitstore.producer.selection import Policy, Threshold, TopK
from logitstore.producer.teacher import Teacher
from logitstore.token_parts import TokenBlock

_SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "vocab_size": 2048},
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "vocab_size": 8192},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=_SIZES, help="small on a CPU, 1b on a GPU if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, two repeats")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    size = "tiny" if options.dry_run else options.size or ("1b" if on_gpu else "small")
    repeats = 2 if options.dry_run else options.repeats
    num_tokens, batch_tokens = (65536, 16384) if on_gpu and not options.dry_run else (4096, 1024)
    rows = _scoring(size, options.device, num_tokens, batch_tokens, repeats)
    rows += _training(size, options.device, repeats)
    rows.append(("check: largest difference of log-probs (nats)", f"{_check(options.device):.3f}", ""))
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    table = Table("what", "median", "ratio", title=f"{size} Llama on {device}, torch {torch.__version__}")
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


def _scoring(size: str, device: str, num_tokens: int, batch_tokens: int, repeats: int) -> list[tuple[str, str, str]]:
    teacher = _teacher(size, "bf16" if device.startswith("cuda") else "fp32", device)
    tokens, windows = _documents(num_tokens, _SIZES[size]["vocab_size"]), Windows(1024, 256)
    words = np.arange(len(tokens.ends), dtype=np.uint64)
    batches = pack(tokens, windows, batch_tokens)

    def forward(batch: PackedBatch) -> torch.Tensor:
        return teacher.hidden(torch.from_numpy(batch.ids).to(device), torch.from_numpy(batch.positions).to(device))

    def bare() -> None:
        for batch in batches:
            forward(batch)

    def with_logits() -> None:
        for batch in batches:
            with torch.inference_mode():
                teacher.head(forward(batch)).float().log_softmax(-1).topk(64).values.cpu()

    def scored(policy: Policy) -> Callable[[], None]:
        def run() -> None:
            score_block(teacher, tokens, words, windows, batch_tokens, Measures(policy=policy))

        return run

    runs = {
        "packed base model": bare,
        "  + float32 log_softmax, topk(64)": with_logits,
        "produce, topk:64": scored(TopK(64)),
        "produce, threshold:0.02": scored(Threshold(0.02)),
    }
    seconds = _take_turns(runs, device, repeats)
    base = seconds["packed base model"]
    return [
        (name, f"{tokens.num_tokens / statistics.median(times):,.0f} tokens/s", _ratio(base, times))
        for name, times in seconds.items()
    ]


def _training(size: str, device: str, repeats: int) -> list[tuple[str, str, str]]:
    shape = _SIZES[size]
    num_rows = 8192 if device.startswith("cuda") else 1024
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, shape["hidden_size"], generator=generator).to(device).requires_grad_()
    head = torch.randn(shape["vocab_size"], shape["hidden_size"], generator=generator) * 0.02
    head = head.to(device).requires_grad_()
    ids = torch.stack([torch.randperm(shape["vocab_size"], generator=generator)[:24] for _ in range(num_rows)])
    ids = ids.to(device)
    weights = torch.full(ids.shape, 1 / 24, device=device)

    def cross_entropy() -> None:
        torch.nn.functional.cross_entropy((hidden @ head.T).float(), ids[:, 0]).backward()

    def distillation() -> None:
        outputs = head_outputs(hidden, head, ids, realised_T=ids[:, 0].contiguous())
        kl = (weights * (outputs.logsumexp_T[:, None] - outputs.gathered_TK)).sum(-1)
        assert outputs.realised_T is not None
        (0.9 * kl + 0.1 * (outputs.logsumexp_T - outputs.realised_T)).mean().backward()

    seconds = _take_turns({"head, cross-entropy": cross_entropy, "head, distillation": distillation}, device, repeats)
    base = seconds["head, cross-entropy"]
    return [(name, f"{statistics.median(times) * 1e3:.1f} ms", _ratio(base, times)) for name, times in seconds.items()]


def _check(device: str) -> float:
    """Largest difference between a log-prob that the device stores in bf16 or float32 and float32's on the CPU."""
    tokens, windows = _documents(512, 2048), Windows(256, 64)
    words = np.arange(len(tokens.ends), dtype=np.uint64)
    dtype = "bf16" if device.startswith("cuda") else "fp32"
    found, expected = (
        score_block(_teacher("tiny", kind, where), tokens, words, windows, 1024, Measures(policy=None)).scalars[:, 0]
        for kind, where in ((dtype, device), ("fp32", "cpu"))
    )
    return float(np.nanmax(np.abs(found - expected)))


def _teacher(size: str, dtype: str, device: str) -> Teacher:
    torch.manual_seed(0)
    heads = max(4, _SIZES[size]["hidden_size"] // 128)
    config = LlamaConfig(**_SIZES[size], num_attention_heads=heads, num_key_value_heads=heads // 4 or 1)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(folder)
        return Teacher.load(Path(folder), dtype=dtype, device=device)


def _documents(num_tokens: int, vocabulary: int) -> TokenBlock:
    """Random tokens in documents of log-normal lengths, a few hundred tokens on average."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(5, 1, num_tokens).astype(np.int64) + 2, 1024)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), num_tokens) + 1]
    ends = np.cumsum(lengths)
    ids = random.integers(0, vocabulary, ends[-1]).astype(np.int32)
    return TokenBlock(ids, np.ones(len(ids), np.int32), ends, np.ones(len(ends), bool))


def _take_turns(runs: dict[str, Callable[[], None]], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, in turns after one warm-up, so that a machine whose speed drifts treats all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            _wait_for(device)
            began = time.perf_counter()
            run()
            _wait_for(device)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _ratio(base: list[float], times: list[float]) -> str:
    """Median of speed relative to the base, turn by turn."""
    return f"{statistics.median(b / t for b, t in zip(base, times, strict=True)):.2f}x"


if __name__ == "__main__":
    main()
