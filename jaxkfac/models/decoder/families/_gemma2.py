"""Gemma 2: norms before and after each layer, soft-capped scores and logits, every other window."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.models.decoder.families._windows import windows

_ACTIVATION = "gelu_pytorch_tanh"


def gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a ``gemma2``."""
    return {
        **gemma(config),
        "attention_softcap": config.get("attn_logit_softcapping", 50.0),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
        **windows(config, config.get("sliding_window", 4096), lambda block: block % 2 == 0),
    }


def gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common.

    Raises:
        ValueError: attention to both sides, or another activation.
    """
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: expected false, a decoder reads leftwards")
    activation = config.get("hidden_activation") or _ACTIVATION
    if activation != _ACTIVATION:
        raise ValueError(f"hidden_activation: expected {_ACTIVATION!r}, got {activation!r}")
    return {
        "activation": activation,
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "head_size": config.get("head_dim") or 256,
        "mlp_bias": False,
        "post_norms": True,
        "unit_offset": True,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
    }
