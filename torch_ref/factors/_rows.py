"""What a layer reads and what flows back into its outputs, as rows."""

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.factors._layers import kind_of


def input_rows(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs as ``(N, S, in)``; of a grouped convolution ``(groups, N, S, in / groups)``.

    Embeddings give their tokens ``(N, S)``: one-hot rows are never formed.
    """
    kind = kind_of(module)
    if kind == "embedding":
        return _examples_first(inputs[..., None]).squeeze(-1)
    if kind in ("conv1d", "conv2d"):
        return _patches(module, inputs)
    return _examples_first(inputs)


def output_rows(module: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the outputs as ``(N, S, out)``, grouped like :func:`input_rows`."""
    if kind_of(module) not in ("conv1d", "conv2d"):
        return _examples_first(gradient)
    if gradient.ndim == len(module.kernel_size) + 1:
        gradient = gradient[None]
    rows = gradient.flatten(2).mT
    return _split_groups(rows, module.groups)


def append_ones(rows: torch.Tensor) -> torch.Tensor:
    """A last column of ones: the homogeneous coordinate that carries the bias."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)


def existing_rows(mask: torch.Tensor, rows_shape: torch.Size, name: str) -> torch.Tensor:
    """Which rows of ``(N, S...)`` exist, from a mask of examples and positions, as ``(N, S)``.

    Axes that the mask lacks are filled: a row exists if its position does. Where the layer has
    fewer axes than the mask (a head on pooled outputs), a row exists if one of its positions
    does.

    Raises:
        ValueError: naming the layer, where the shapes agree in neither way.
    """
    mask = mask.bool()
    shared = min(mask.ndim, len(rows_shape))
    if mask.shape[:shared] != rows_shape[:shared]:
        raise ValueError(
            f"layer {name!r}: its rows have the shape {tuple(rows_shape)} and the mask "
            f"{tuple(mask.shape)}; give a mask of examples and positions as the layer sees them, "
            "or leave the layer out with layers="
        )
    exists = mask.flatten(shared).any(-1) if mask.ndim > shared else mask
    exists = exists.reshape(*exists.shape, *[1] * (len(rows_shape) - shared)).expand(rows_shape)
    return exists.reshape(rows_shape[0], -1)


def _examples_first(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > 1 else x[None, None]


def _patches(module: nn.Conv1d | nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
    dims = len(module.kernel_size)
    x = inputs if inputs.ndim == dims + 2 else inputs[None]
    x = _pad(module, x)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    if dims == 1:  # unfold wants images: one pixel high
        x, kernel, stride, dilation = x[..., None, :], (1, *kernel), (1, *stride), (1, *dilation)
    patches = F.unfold(x, kernel, dilation=dilation, stride=stride)  # (N, C k1 k2, S)
    return _split_groups(patches.mT, module.groups)


def _pad(module: nn.Conv1d | nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    if module.padding == "valid":
        return x
    if module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in module.padding]
    flat = [p for side in reversed(sides) for p in side]  # F.pad begins with the last axis
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, flat, mode=mode)


def _split_groups(rows: torch.Tensor, groups: int) -> torch.Tensor:
    if groups == 1:
        return rows
    return rows.reshape(*rows.shape[:-1], groups, -1).movedim(-2, 0)
