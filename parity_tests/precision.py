"""The dtype, device and multiplication mode of both frameworks, set explicitly and put back."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import torch

TORCH_DTYPE = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


def torch_device(device: str) -> torch.device:
    """PyTorch's device of a case.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if device == "gpu" and not torch.cuda.is_available():
        raise RuntimeError(
            "this case runs PyTorch on CUDA, and torch.cuda.is_available() is False: install a "
            "build of PyTorch with CUDA, or deselect the cases marked gpu"
        )
    return torch.device("cuda" if device == "gpu" else "cpu")


@contextlib.contextmanager
def precision(dtype: str, device: str, *, tf32: bool) -> Iterator[None]:
    """Float64 where asked for, the device, and TF32 on or off on both sides."""
    torch_device(device)
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    products = "tensorfloat32" if tf32 else "highest"
    try:
        for backend in backends:
            backend.allow_tf32 = tf32
        with (
            jax.enable_x64(dtype == "float64"),
            jax.default_device(jax.devices(device)[0]),
            jax.default_matmul_precision(products),
        ):
            yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            backend.allow_tf32 = was
