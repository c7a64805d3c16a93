"""Settings of the CUDA caching allocator, which it reads once."""

import os
import sys

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def configure_allocator(
    *, expandable_segments: bool = True, max_split_size_mb: int | None = None
) -> str:
    """Write the allocator's settings into the environment, before torch is imported.

    Call it first in a script: importing ``torch_ref.accumulation`` does not import torch.

    Args:
        expandable_segments: Grow segments instead of adding new ones, against fragmentation.
        max_split_size_mb: Blocks larger than this are never split, in MiB; ``None`` is no limit.

    Returns:
        What ``PYTORCH_CUDA_ALLOC_CONF`` is now. Other settings that it had are kept.

    Raises:
        RuntimeError: torch is imported already, so the settings could come too late.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            f"torch is imported already and may have read {VARIABLE}; call configure_allocator "
            "before the first import of torch"
        )
    settings = dict(
        pair.split(":", 1) for pair in os.environ.get(VARIABLE, "").split(",") if ":" in pair
    )
    settings["expandable_segments"] = str(expandable_segments)
    if max_split_size_mb is not None:
        settings["max_split_size_mb"] = str(max_split_size_mb)
    os.environ[VARIABLE] = ",".join(f"{name}:{value}" for name, value in settings.items())
    return os.environ[VARIABLE]
