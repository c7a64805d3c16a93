"""Settings of the CUDA caching allocator, which it reads once."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Literal

VARIABLE, NEWER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
LARGE_SEGMENT_MB = 20  # of which torch allocates; it refuses to split nothing larger


def configure_allocator(
    *,
    expandable_segments: bool = True,
    max_split_size_mb: int | None = None,
    roundup_power2_divisions: int | Mapping[int | Literal[">"], int] | None = None,
    garbage_collection_threshold: float | None = None,
) -> str:
    """Write the allocator's settings into the environment, before torch is imported.

    Call it first in a script: importing ``torch_ref.accumulation`` does not import torch.

    Two variables have a say. Torch before 2.9 knows ``PYTORCH_CUDA_ALLOC_CONF`` alone. Torch
    2.9.1 warns of it, and yet takes ``expandable_segments`` from no other (its issue 183387).
    Torch 2.13 reads it first, without a warning, and ``PYTORCH_ALLOC_CONF`` only where it is not
    set. So the older name is written, and the newer one taken out of the environment, with its
    settings kept; where both have one, the older's counts, as in torch.

    Args:
        expandable_segments: Grow segments instead of adding new ones, against fragmentation.
        max_split_size_mb: Blocks larger than this are never split, in MiB, above 20; ``None``
            is no limit.
        roundup_power2_divisions: Sizes are rounded up to one of so many equal steps between
            two powers of two: a power of two, or one for each size in MiB, ``{256: 1, 512: 2,
            ">": 4}``, with ``">"`` for all that are larger. ``None`` rounds to 512 bytes.
        garbage_collection_threshold: Above this fraction of the memory that is allowed, unused
            blocks are given back, in (0, 1); ``None`` waits until memory runs out.

    Returns:
        What ``PYTORCH_CUDA_ALLOC_CONF`` is now. Other settings of both variables are kept.

    Raises:
        RuntimeError: torch is imported already, so the settings could come too late.
        ValueError: a setting is out of its range; torch would refuse it when it first
            allocates.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            f"torch is imported already and may have read {VARIABLE}; call configure_allocator "
            "before the first import of torch"
        )
    wanted = {
        "expandable_segments": str(expandable_segments),
        "max_split_size_mb": _split_size(max_split_size_mb),
        "roundup_power2_divisions": _divisions(roundup_power2_divisions),
        "garbage_collection_threshold": _threshold(garbage_collection_threshold),
    }
    settings = _read(NEWER) | _read(VARIABLE)
    settings |= {name: value for name, value in wanted.items() if value is not None}
    os.environ.pop(NEWER, None)
    os.environ[VARIABLE] = ",".join(f"{name}:{value}" for name, value in settings.items())
    return os.environ[VARIABLE]


def _split_size(size: int | None) -> str | None:
    if size is not None and size <= LARGE_SEGMENT_MB:
        raise ValueError(f"max_split_size_mb must be above {LARGE_SEGMENT_MB} MiB, got {size}")
    return None if size is None else str(size)


def _divisions(divisions: int | Mapping[int | Literal[">"], int] | None) -> str | None:
    if divisions is None:
        return None
    steps = divisions if isinstance(divisions, Mapping) else {">": divisions}
    if not steps or not all(
        _is_power_of_two(number) and (size == ">" or _is_power_of_two(size))
        for size, number in steps.items()
    ):
        raise ValueError(
            "roundup_power2_divisions is a power of two, or {size in MiB: power of two} with "
            f"sizes that are powers of two or '>', got {divisions!r}"
        )
    if not isinstance(divisions, Mapping):
        return str(divisions)
    in_order = sorted(steps, key=lambda size: (size == ">", size))
    return "[" + ",".join(f"{size}:{steps[size]}" for size in in_order) + "]"


def _threshold(threshold: float | None) -> str | None:
    if threshold is not None and not 0 < threshold < 1:
        raise ValueError(
            f"garbage_collection_threshold is a fraction of the memory, in (0, 1), got {threshold}"
        )
    return None if threshold is None else f"{threshold:f}"


def _is_power_of_two(number: object) -> bool:
    return isinstance(number, int) and number > 0 and number & (number - 1) == 0


def _read(variable: str) -> dict[str, str]:
    pairs = re.split(r",(?![^\[]*\])", os.environ.get(variable, ""))  # not inside a list
    return dict(pair.strip().split(":", 1) for pair in pairs if ":" in pair)
