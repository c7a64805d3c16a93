"""Give cached blocks of the allocator back to the device."""

import gc

import torch


def release_cache() -> None:
    """Free what only dead reference cycles hold, and return cached blocks to the driver.

    Without CUDA there is no cache and nothing is done. Emptying it synchronises the device and
    makes later allocations slow again, so it belongs after a phase, never inside a loop over
    layers.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
