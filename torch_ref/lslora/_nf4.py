"""Base layers in four bits: made with bitsandbytes, multiplied and differentiated here."""

import re
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def quantize(model: nn.Module, target: str, *, double: bool = True) -> list[str]:
    """Freeze linear layers and put their weights into NF4: ``bitsandbytes.nn.Linear4bit``.

    Args:
        model: Changed in place; :func:`attach` comes afterwards.
        target: Regular expression over module names, a full match.
        double: Whether the scales are quantised too, in 8 bits.

    Returns:
        The names of the quantised layers. A float64 weight is quantised as float32.

    Raises:
        ImportError: bitsandbytes is not installed.
        ValueError: the target matches no linear layer in full precision.
    """
    layers = _bitsandbytes().nn
    linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n}
    found = [name for name in linear if re.fullmatch(target, name)]
    if not found:
        raise ValueError(
            f"target {target!r} matches none of the linear layers {list(linear)} in full precision"
        )
    for name in found:
        base = linear[name]
        new = layers.Linear4bit(
            base.in_features,
            base.out_features,
            bias=False,
            compress_statistics=double,
            quant_type="nf4",
            device="meta",
        )
        weight = base.weight.detach()
        new.weight = layers.Params4bit(
            weight.float() if weight.dtype == torch.float64 else weight,
            compress_statistics=double,
            quant_type="nf4",
            module=new,
        ).to(weight.device)  # which quantises
        new.bias = base.bias
        new.requires_grad_(False).train(base.training)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    return found


def form_of(base: nn.Linear, name: str) -> tuple[torch.Size, torch.dtype]:
    """Shape ``(out, in)`` and dtype of a weight, of a packed one those that it decodes to.

    Raises:
        ValueError: naming the layer, if its weight cannot be read.
    """
    weight = base.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        if not weight.is_floating_point() or hasattr(weight, "quant_state"):
            raise ValueError(
                f"layer {name!r}: expected a floating weight or one that bitsandbytes has put into "
                f"four bits, got {type(base).__name__} with {weight.dtype}; a Linear4bit is "
                "quantised when it is moved to its device"
            )
        return weight.shape, weight.dtype
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"layer {name!r}: bitsandbytes has repacked its weight for inference on this CPU, in a "
            "forward pass in evaluation mode; attach adapters before the first one"
        )
    return state.shape, state.dtype


def base_output(base: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    r"""$W x$ plus the bias of a frozen layer, in full precision or in four bits.

    A packed weight is decoded in float32 or narrower, and multiplied in the layer's
    ``compute_dtype``, by default that of ``x``. The backward pass decodes it again.
    """
    # Not by bitsandbytes' own product. On a CPU, version 0.50.2 returns memory that nothing has
    # written for rows of float64, and in evaluation mode, where the processor has AVX-512 BF16,
    # multiplies in bfloat16 (0.4 % off) and repacks the weight, after which no training step runs.
    if getattr(base.weight, "quant_state", None) is None:
        return base(x)
    dtype = base.compute_dtype or x.dtype
    y = _Product.apply(x.to(dtype), base.weight)
    return (y if base.bias is None else y + base.bias.to(dtype)).to(x.dtype)


class _Product(torch.autograd.Function):
    """Keeps the codes for the backward pass, and no decoded weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return F.linear(x, _decode(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ _decode(ctx.weight).to(gradient.dtype), None


def _decode(weight: Any) -> torch.Tensor:
    return _bitsandbytes().functional.dequantize_4bit(weight.data, weight.quant_state)


def _bitsandbytes() -> ModuleType:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ImportError(
            "weights in four bits need bitsandbytes, which is not installed: "
            "pip install 'bitsandbytes>=0.48'"
        ) from error
    return bitsandbytes
