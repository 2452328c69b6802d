"""What a model does to its logits after the output embedding; read off its configuration, by those who run one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogitTransform:
    """``softcap * tanh(scale * logits / softcap)``, or ``scale * logits`` without a softcap."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of_config(cls, config: Any) -> LogitTransform:
        """From a transformers configuration object (of the text model)."""
        scale = 1.0
        if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
            scale = float(config.logit_scale)
        if getattr(config, "logits_scaling", None) is not None:  # Granite divides
            scale = 1.0 / float(config.logits_scaling)
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        return cls(scale, None if softcap is None else float(softcap))
