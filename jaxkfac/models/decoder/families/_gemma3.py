"""Gemma 3, the text model: norms of heads, and other rotary angles in the blocks with a window."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.models.decoder._rotary import Rotary
from jaxkfac.models.decoder.families._gemma2 import gemma
from jaxkfac.models.decoder.families._windows import windows


def gemma3_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``gemma3_text``.

    Raises:
        ValueError: soft-capped attention, which no Gemma 3 has.
    """
    if config.get("attn_logit_softcapping"):
        raise ValueError("attn_logit_softcapping: expected null in a gemma3_text")
    window, every = config.get("sliding_window", 4096), config.get("sliding_window_pattern", 6)
    return {
        **gemma(config),
        "head_norms": True,
        "logit_softcap": config.get("final_logit_softcapping"),
        "rotary": _rotary(config, "full_attention", "rope_theta", 1e6),
        "local_rotary": _rotary(config, "sliding_attention", "rope_local_base_freq", 1e4),
        **windows(config, window, lambda block: (block + 1) % every > 0),
    }


def _rotary(config: Mapping[str, Any], kind: str, theta: str, default: float) -> Rotary:
    """Of one kind of block; ``rope_scaling`` of older files is of the full ones."""
    found = {"rope_theta": config.get(theta, default)}
    if kind == "full_attention":
        found |= config.get("rope_scaling") or {}
    found |= (config.get("rope_parameters") or {}).get(kind) or {}
    return Rotary.from_hugging_face({**config, "rope_scaling": None, "rope_parameters": found})
