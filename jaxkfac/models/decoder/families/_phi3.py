"""Phi-3: a window, where the file gives one, in all blocks."""

from collections.abc import Mapping
from typing import Any


def phi3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``phi3``."""
    return {
        "norm_epsilon": config.get("rms_norm_eps", 1e-5),
        "sliding_window": config.get("sliding_window"),
    }
