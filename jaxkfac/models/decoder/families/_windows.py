"""Which blocks have the window."""

from collections.abc import Callable, Mapping
from typing import Any

_KINDS = ("sliding_attention", "full_attention")


def windows(
    config: Mapping[str, Any], window: int | None, otherwise: Callable[[int], bool]
) -> dict[str, Any]:
    """``sliding_window`` and ``windowed`` of a decoder.

    Args:
        config: Its ``config.json``; new files have a list ``layer_types``.
        window: What the file says.
        otherwise: Whether a block has the window, by its number, where there is no list.

    Raises:
        ValueError: a layer of another type, by name, or another number of them.
    """
    kinds, depth = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        kinds = [_KINDS[not otherwise(block)] for block in range(depth)]
    if len(kinds) != depth:
        raise ValueError(f"layer_types: expected {depth}, one per block, got {len(kinds)}")
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise ValueError(f"layer_types: expected {' or '.join(_KINDS)}, got {', '.join(unknown)}")
    windowed = tuple(kind == _KINDS[0] for kind in kinds)
    if window is None or not any(windowed):
        return {"sliding_window": None}
    return {"sliding_window": window, "windowed": None if all(windowed) else windowed}
