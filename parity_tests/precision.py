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


def tf32_switches() -> tuple[tuple[Any, str, Any, Any], ...]:
    """PyTorch's ``(owner, attribute, value without TF32, value with it)``.

    The two interfaces do not mix: where a product is in TF32 by ``fp32_precision`` alone, or
    convolutions are not, PyTorch 2.13 raises when ``allow_tf32`` is read.
    """
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if not hasattr(products, "fp32_precision"):  # PyTorch before 2.9
        return tuple((owner, "allow_tf32", False, True) for owner in (products, cudnn))
    owners = products, cudnn.conv, cudnn.rnn
    return tuple((owner, "fp32_precision", "ieee", "tf32") for owner in owners)


@contextlib.contextmanager
def precision(dtype: str, device: str, *, tf32: bool) -> Iterator[None]:
    """Float64 where asked for, the device, and TF32 on or off on both sides."""
    torch_device(device)
    switches = tf32_switches()
    before = [getattr(owner, attribute) for owner, attribute, _, _ in switches]
    products = "tensorfloat32" if tf32 else "highest"
    try:
        for owner, attribute, off, on in switches:
            setattr(owner, attribute, on if tf32 else off)
        with (
            jax.enable_x64(dtype == "float64"),
            jax.default_device(jax.devices(device)[0]),
            jax.default_matmul_precision(products),
        ):
            yield
    finally:
        for (owner, attribute, _, _), was in zip(switches, before, strict=True):
            setattr(owner, attribute, was)
