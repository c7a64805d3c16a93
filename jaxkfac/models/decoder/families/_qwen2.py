"""Qwen 2 and 2.5: biases of queries, keys and values; a window, if any, in the upper blocks."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.models.decoder.families._windows import windows


def qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``qwen2``."""
    return {"attention_bias": False, "qkv_bias": True, "mlp_bias": False, **upper_windows(config)}


def upper_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The window of blocks from ``max_window_layers`` on; none without ``use_sliding_window``."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    below = config.get("max_window_layers", 28)
    return windows(config, window, lambda block: block >= below)
