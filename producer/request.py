"""What a produce run was asked for, checked before anything long begins."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from logitstore.errors import ConfigError, TokenizerError
from logitstore.hub import resolve_folder, split_model
from logitstore.producer.given import Given
from logitstore.producer.packing import Windows
from logitstore.producer.selection import Policy, ThresholdBudget, parse_selection, parts_of
from logitstore.signals import SIGNALS
from logitstore.sparse import DEFAULT_STEP_NATS
from logitstore.tokenizer import Tokenizer

_PROJECTED = "sparse@"
_MAX_TAIL_STEP_NATS = 4.0
_MIN_STEP_NATS = 0.01
"""Log-probs are stored down to -65,534 steps: at this one to -655 nats."""


@dataclass(frozen=True, kw_only=True)
class ProduceConfig:
    """How teachers are run. The names are those of the options of ``logitstore produce``."""

    signals: tuple[str, ...] = SIGNALS
    """Which signals to store; ``sparse@NAME`` is ``sparse`` on the classes shared with the tokenizer of that name."""
    select: str = "threshold:12"
    """Selection policy of the sparse signal."""
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures that a student may be trained at from entries of which none is sampled."""
    logprob_step: float = DEFAULT_STEP_NATS
    """Step, in nats, to which the entries' log-probs are rounded."""
    tail_step: float | None = None
    """Steps of log-probs double with every factor of 4 below p = 1/64, up to this, in nats; they do not by default."""
    sampled_logprobs: bool = False
    """Whether sampled entries keep their log-prob; at temperature 1 their weight is known without it."""
    portable: bool = False
    """Whether to store with standard codecs only, at several times the size; no part of the recipe."""
    log_z: bool = False
    """Whether the scalars include the log of the sum of exp(logit)."""
    max_length: int | None = None
    """Tokens that a teacher sees at once; its context length by default."""
    overlap: int | None = None
    """Tokens of context that a window of a long document repeats; a quarter of the window by default."""
    dtype: str = "auto"
    """``bf16``, ``fp16``, ``fp32``; ``auto`` is bf16 on a GPU and fp32 on a CPU."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU if there is one."""
    batch_tokens: int | None = None
    """Tokens of a packed batch."""
    deterministic: bool | None = None
    """Bitwise repeatable signals; the default on a CPU."""
    threads: int | None = None
    """CPU threads of torch; those of the machine by default."""
    seed: int = 0
    """Of the sampled entries."""
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for signal in self.signals or ("",):
            if signal not in SIGNALS and not projected_name(signal):
                raise ConfigError(f"--signals {signal!r}: expected some of {', '.join(SIGNALS)}, sparse@TOKENIZER")
        if 1.0 not in self.temperatures or not all(0 < temperature < math.inf for temperature in self.temperatures):
            raise ConfigError(f"--temperatures {self.temperatures}: expected positive numbers, 1 among them")
        # One order, because it is part of the recipe; 1 comes first.
        object.__setattr__(self, "temperatures", tuple(sorted(set(self.temperatures), key=lambda t: (t != 1.0, t))))
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"--seed {self.seed}: expected a whole number from 0 to 2^64 - 1")
        if not _MIN_STEP_NATS <= self.logprob_step <= 1:
            raise ConfigError(f"--logprob-step {self.logprob_step:g}: expected nats, {_MIN_STEP_NATS:g} to 1")
        if self.tail_step is not None and not self.logprob_step <= self.tail_step <= _MAX_TAIL_STEP_NATS:
            raise ConfigError(
                f"--tail-step {self.tail_step:g}: expected nats, {self.logprob_step:g} (--logprob-step) to "
                f"{_MAX_TAIL_STEP_NATS:g}"
            )
        if self.samples and len(self.temperatures) > 1:  # a selection that cannot be is refused here as well
            raise ConfigError(
                "--temperatures other than 1 need --select topk:K, or another that samples nothing: draws made at "
                "temperature 1 cannot serve another"
            )

    @cached_property
    def selection(self) -> Policy | ThresholdBudget:
        """Read once, because ids given from outside are read with it."""
        return parse_selection(self.select, self.seed)

    @property
    def samples(self) -> bool:
        return isinstance(self.selection, ThresholdBudget) or self.selection.draw_weight is not None

    @property
    def given(self) -> Given | None:
        """The part of the selection that is given from outside."""
        return next((part for part in parts_of(self.selection) if isinstance(part, Given)), None)

    def resolved_device(self) -> str:
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def check_device(self) -> None:
        """Refuse a device that is not there, before anything long.

        Raises:
            ConfigError: no such device.
        """
        import torch

        try:
            torch.empty(1, device=self.resolved_device())
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"--device {self.device}: not usable here: {str(error).splitlines()[0]}") from error

    def resolved_dtype(self, device: str) -> str:
        return self.dtype if self.dtype != "auto" else ("fp32" if device == "cpu" else "bf16")

    def resolved_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class TeacherRequest:
    """One teacher: its name in the dataset, its folder, its tokenizer, and how long it sees."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    windows: Windows
    fingerprint: str = field(repr=False)

    @classmethod
    def parse(cls, text: str, config: ProduceConfig, chat_template: str | None = None) -> TeacherRequest:
        """``[NAME=]MODEL[@REVISION]``, resolved and checked.

        Raises:
            ModelError: no such model, or it is not what its configuration says.
            TokenizerError: its tokenizer has ids that the model does not.
            ConfigError: ``max_length`` is longer than its context.
        """
        from logitstore.producer.fingerprint import fingerprint_model
        from logitstore.producer.teacher import configured_vocabulary, context_length

        name, model = "", text
        if "=" in text and not Path(text).expanduser().exists():
            name, model = text.split("=", 1)
        model, revision = split_model(model)
        folder = resolve_folder(model, revision, pickle=config.allow_pickle)
        tokenizer = Tokenizer.from_folder(str(folder), chat_template)
        trust = config.trust_remote_code
        vocabulary = configured_vocabulary(folder, trust_code=trust)
        if tokenizer.vocab_size > vocabulary:
            raise TokenizerError(
                f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, its model only {vocabulary}: they do not "
                "belong together; save the right tokenizer beside the model"
            )
        if config.given is not None:
            config.given.check_vocabulary(vocabulary, name or str(folder))
        windows = _windows(str(folder), context_length(folder, trust_code=trust), config)
        fingerprint = fingerprint_model(folder, allow_pickle=config.allow_pickle, trust_code=trust)
        return cls(name or folder.resolve().name, folder, tokenizer, windows, fingerprint)


def projected_name(signal: str) -> str:
    """What stands behind ``sparse@``: the tokenizer that a signal is projected for; empty for another signal."""
    return signal.removeprefix(_PROJECTED) if signal.startswith(_PROJECTED) else ""


def projected_tokenizers(signals: Iterable[str], known: Iterable[tuple[str, Tokenizer]]) -> dict[str, Tokenizer]:
    """By signal, the tokenizer that it is projected for.

    Raises:
        ConfigError: none of that name is known.
    """
    tokenizers, found = dict(known), dict[str, Tokenizer]()
    for signal in filter(projected_name, signals):
        if projected_name(signal) not in tokenizers:
            names = ", ".join(tokenizers) or "none"
            raise ConfigError(f"--signals {signal}: no tokenizer of that name; there are: {names}")
        found[signal] = tokenizers[projected_name(signal)]
    return found


def execution(config: ProduceConfig, device: str, batch_tokens: int) -> dict[str, Any]:
    """What a deterministic run adds to the recipe: all that the bits of a forward pass depend on."""
    deterministic = config.deterministic if config.deterministic is not None else device == "cpu"
    if not deterministic:
        return {}
    plan = {"device": device.split(":")[0], "batch_tokens": str(batch_tokens)}
    if device == "cpu":
        plan["threads"] = str(config.resolved_threads())
    return {"deterministic": plan}


def _windows(where: str, context: int, config: ProduceConfig) -> Windows:
    length = config.max_length or context
    if length > context:
        raise ConfigError(f"--max-length {length}: {where} sees at most {context} tokens")
    if length < 2:
        raise ConfigError(f"--max-length {length}: at least 2 tokens are needed")
    overlap = length // 4 if config.overlap is None else config.overlap
    if not 0 <= overlap < length:
        raise ConfigError(f"--overlap {overlap}: expected 0 <= overlap < max-length ({length})")
    return Windows(length, overlap)
