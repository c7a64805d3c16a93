"""Qwen 3: norms of every head's queries and keys; windows as in Qwen 2."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.models.decoder.families._qwen2 import upper_windows


def qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``qwen3``."""
    return {
        "head_size": config.get("head_dim") or 128,
        "head_norms": True,
        "mlp_bias": False,
        **upper_windows(config),
    }
