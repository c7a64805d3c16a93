"""Loading, casting and moving a model, as the document on FLAN-T5-XL had them."""

import gc
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import nn


def cast_again(model: nn.Module, dtype: torch.dtype, *, check: bool) -> nn.Module:
    """``Module.to(dtype)`` of a model that may have the dtype already.

    Before: ``check=False``, always. After: only where the dtype differs; the model from before is
    kept by another name, deleted after the cast, and garbage collected. ``Module.to`` works in
    place and returns the module that it was given, so that other name is the same model.
    :func:`torch_ref.memory.cast_once` is this package's.

    Claims: ``flan-t5-xl/cast-again``, ``flan-t5-xl/old-model``.
    """
    if not check:
        return model.to(dtype=dtype)
    if next(model.parameters()).dtype != dtype:
        before = model
        model = model.to(dtype=dtype)
        del before
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        gc.collect()
    return model


def move_again(model: nn.Module, device: torch.device | str, *, check: bool) -> nn.Module:
    """``Module.to(device)`` of a model that may be there already.

    Before: ``check=False``, always. After: only where the first parameter is on a device of
    another type. :func:`torch_ref.memory.place_once` is this package's.

    Claim: ``flan-t5-xl/move-again``.
    """
    device = torch.device(device)
    if not check or next(model.parameters()).device.type != device.type:
        model = model.to(device)
    return model


def load(
    build: Callable[[], nn.Module], file: Path | str, *, dtype: torch.dtype, in_dtype: bool
) -> nn.Module:
    """Build a model, read a whole safetensors file, and copy the one into the other.

    Before: ``in_dtype=False``, built in float32 and cast to ``dtype`` afterwards, parameter by
    parameter. After: ``in_dtype=True``, built in ``dtype`` from the start.
    :func:`torch_ref.memory.load_once` builds without memory and reads tensor by tensor.

    Claim: ``flan-t5-xl/load``.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype if in_dtype else torch.float32)
    try:
        model = build()
    finally:
        torch.set_default_dtype(usual)
    model.load_state_dict(safetensors.torch.load_file(str(file)))
    return cast_again(model, dtype, check=True)
