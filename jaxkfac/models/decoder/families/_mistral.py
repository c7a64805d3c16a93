"""Mistral: a window in all blocks, of 4096 where the file does not say; null is none."""

from collections.abc import Mapping
from typing import Any


def mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``mistral``."""
    return {"sliding_window": config.get("sliding_window", 4096)}
