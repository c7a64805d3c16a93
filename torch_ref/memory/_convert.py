"""Convert a model only if its dtype differs, and move it only if its device differs."""

import itertools

import torch
from torch import nn


def cast_once(model: nn.Module, dtype: torch.dtype) -> int:
    """Convert floating parameters and buffers to ``dtype``, one tensor at a time.

    Args:
        model: Converted in place. Integer tensors are left alone, tied parameters stay tied.
        dtype: The target, floating.

    Returns:
        How many tensors were converted; 0 where nothing had to be done.

    Raises:
        ValueError: ``dtype`` is not floating.

    Memory:
        One tensor beyond the model: each old copy is dropped before the next is made.
        Gradients are dropped, since they have the old dtype.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"a model is cast to a floating dtype, got {dtype}")
    return _replace(
        model,
        lambda x: x.is_floating_point() and x.dtype != dtype,
        lambda x: x.to(dtype),
    )


def place_once(model: nn.Module, device: torch.device | str) -> int:
    """Move parameters and buffers to ``device``, one tensor at a time.

    Args:
        model: Moved in place; tied parameters stay tied.
        device: ``"cuda"`` is the current CUDA device, as everywhere in PyTorch.

    Returns:
        How many tensors were moved; 0 where nothing had to be done.

    Memory:
        On the device nothing beyond the model. Gradients are dropped, since they are on the
        old device.
    """
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return _replace(model, lambda x: x.device != target, lambda x: x.to(target))


def _replace(model: nn.Module, differs, convert) -> int:
    replaced = 0
    # parameters() and buffers() name a shared tensor once, so what is tied stays tied.
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if differs(tensor):
            tensor.grad = None
            tensor.data = convert(tensor.data)
            replaced += 1
    return replaced
