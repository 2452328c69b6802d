"""Which attention to ask transformers for; read off a model's configuration, by those who run one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def attention_implementation(config: Mapping[str, Any]) -> str | None:
    """``eager`` where SDPA would be wrong; None leaves it to transformers: SDPA where the architecture allows it.

    Args:
        config: the parsed config.json.
    """
    # Some versions of transformers run Gemma 2 with SDPA, which leaves out the softcap of its attention.
    text_config = config.get("text_config") or config
    return "eager" if text_config.get("attn_logit_softcapping") is not None else None
