"""Which modules have factors, and their gradients as matrices."""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

Kind = Literal["linear", "conv1d", "conv2d", "embedding", "transposed linear"]


class LayerGradient(NamedTuple):
    """The gradient of one layer, outputs first.

    Attributes:
        weight: ``(out, in)``, with a joint bias as a last column ``(out, in + 1)``; a grouped
            convolution has its groups before: ``(groups, out, in)``.
        bias: ``(out,)`` or ``(groups, out)`` where the bias has a block of its own.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a layer, or ``None`` for a module without factors of its own."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv1d):
        return "conv1d"
    if isinstance(module, nn.Conv2d):
        return "conv2d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    # Hugging Face's Conv1D (GPT-2) is a linear layer with the kernel stored (in, out). Known
    # by name, so that transformers need not be installed.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "transposed linear"
    return None


def find_layers(model: nn.Module, layers: str | None = None) -> dict[str, nn.Module]:
    """Modules with factors and a trainable weight, by their name in the model.

    Args:
        model: Any module.
        layers: A regular expression that must match a whole name; ``None`` is all.

    Raises:
        ValueError: nothing matches, or an embedding changes its own gradient.
    """
    known = {
        name: module
        for name, module in model.named_modules()
        if kind_of(module) is not None and module.weight.requires_grad
    }
    found = {n: m for n, m in known.items() if layers is None or re.fullmatch(layers, n)}
    if not found:
        raise ValueError(f"layers {layers!r} matches none of the trainable layers {list(known)}")
    for name, module in found.items():
        if kind_of(module) == "embedding" and (module.scale_grad_by_freq or module.max_norm):
            raise ValueError(
                f"{name!r} uses scale_grad_by_freq or max_norm: its gradient is not that of a "
                "linear layer on one-hot rows; leave it out with layers="
            )
    return found


def read_gradient(module: nn.Module, *, bias: Literal["joint", "separate"]) -> LayerGradient:
    """``.grad`` of a layer as a matrix ``(out, in)``.

    Raises:
        ValueError: the layer has no gradient.
    """
    if module.weight.grad is None:
        raise ValueError(f"{module} has no gradient; call backward() first")
    weight = _to_matrix(module, module.weight.grad)
    if getattr(module, "bias", None) is None:
        return LayerGradient(weight)
    column = module.bias.grad.reshape(weight.shape[:-1])
    if bias == "separate":
        return LayerGradient(weight, column)
    return LayerGradient(torch.cat([weight, column[..., None]], dim=-1))


def read_gradients(
    model: nn.Module, names: Mapping[str, object], *, bias: Literal["joint", "separate"] = "joint"
) -> dict[str, LayerGradient]:
    """:func:`read_gradient` of the layers named, for example of collected factors."""
    return {name: read_gradient(model.get_submodule(name), bias=bias) for name in names}


def write_gradients(model: nn.Module, gradients: Mapping[str, LayerGradient]) -> None:
    """Put matrices back into ``.grad``: the inverse of :func:`read_gradients`."""
    for name, gradient in gradients.items():
        module = model.get_submodule(name)
        weight, bias = gradient
        if getattr(module, "bias", None) is not None:
            if bias is None:
                weight, bias = weight[..., :-1], weight[..., -1]
            module.bias.grad = bias.reshape(module.bias.shape).to(module.bias.dtype)
        if kind_of(module) in ("transposed linear", "embedding"):
            weight = weight.mT
        module.weight.grad = weight.reshape(module.weight.shape).to(module.weight.dtype)


def _to_matrix(module: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    if kind_of(module) in ("transposed linear", "embedding"):
        return gradient.mT
    matrix = gradient.flatten(1)  # a patch is flattened in the kernel's order: channel, k1, k2
    groups = getattr(module, "groups", 1)
    return matrix if groups == 1 else matrix.reshape(groups, -1, matrix.shape[-1])
