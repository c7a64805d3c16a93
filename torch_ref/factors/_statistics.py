"""The two Kronecker factors of one use of one layer, on the documents' scale."""

import dataclasses
from typing import Literal

import torch
from torch import nn

from torch_ref.factors._layers import kind_of
from torch_ref.factors._rows import append_ones, existing_rows, input_rows, output_rows

Sharing = Literal["expand", "reduce"]
Bias = Literal["joint", "separate"]


@dataclasses.dataclass(frozen=True)
class LayerFactors:
    r"""The factors of one layer.

    $$ A = \frac{1}{\text{rows}} \sum a a^\top, \qquad G = \frac{1}{\text{rows}} \sum g g^\top $$

    with $g$ the gradient of the *mean* loss.

    Attributes:
        a: ``(in, in)``, with a joint bias ``(in + 1, in + 1)``, its ones last; of an embedding
            the diagonal ``(in,)``; of a grouped convolution ``(groups, in, in)``.
        g: ``(out, out)`` or ``(groups, out, out)``.
        rows: How many rows were summed; ``None`` where averaged counts differ.
        bias: Where the bias is: in ``a``, in a block of its own, which is ``g``, or nowhere.
    """

    a: torch.Tensor
    g: torch.Tensor
    rows: int | None
    bias: Literal["joint", "separate", "none"]


def form_factors(
    name: str,
    module: nn.Module,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    *,
    sharing: Sharing,
    bias: Bias,
    mask: torch.Tensor | None,
    gram_dtype: torch.dtype | None,
) -> LayerFactors:
    """Factors of one call of a layer, on the device and in the dtype of its rows.

    Args:
        name: For messages.
        module: The layer.
        inputs: What it was called with.
        gradient: Of the mean loss with respect to its outputs.
        sharing: ``"expand"``: each position is a row. ``"reduce"``: an example is a row, its
            inputs averaged over positions and its gradients summed. Embeddings expand always.
        bias: ``"joint"`` appends a column of ones.
        mask: Which positions exist, ``(N, S)``; others are in no sum and no count.
        gram_dtype: What rows are converted to before they are multiplied; ``None`` keeps theirs.
    """
    kind = kind_of(module)
    has_bias = getattr(module, "bias", None) is not None
    a, g = input_rows(module, inputs), output_rows(module, gradient)
    if gram_dtype is not None:
        g = g.to(gram_dtype)
        a = a if kind == "embedding" else a.to(gram_dtype)

    exists = _existing(name, module, inputs, gradient, mask)  # (N, S)
    if kind == "embedding" and module.padding_idx is not None:
        exists = exists & (a != module.padding_idx)  # it has no gradient: it is no row
    by_example = sharing == "reduce" and kind != "embedding"
    rows = int((exists.any(-1) if by_example else exists).sum())
    if rows == 0:
        raise ValueError(f"layer {name!r}: the mask leaves none of its {exists.numel()} rows")

    if kind == "embedding":
        counts = torch.bincount(a[exists], minlength=module.num_embeddings)
        counts = counts.to(torch.promote_types(g.dtype, torch.float32))  # bfloat16 ends at 256
        return LayerFactors(counts / rows, _gram(g[exists], rows), rows, "none")
    if has_bias and bias == "joint":
        a = append_ones(a)
    if mask is not None:  # the column of ones becomes the mask itself
        absent = ~exists[..., None]
        a, g = a.masked_fill(absent, 0), g.masked_fill(absent, 0)
    if by_example:
        positions = exists.sum(-1).clamp(min=1)[:, None]
        a, g = a.sum(-2) / positions.to(a.dtype), g.sum(-2)
    else:
        a, g = a.flatten(-3, -2), g.flatten(-3, -2)
    return LayerFactors(_gram(a, rows), _gram(g, rows), rows, bias if has_bias else "none")


def _gram(rows: torch.Tensor, count: int) -> torch.Tensor:
    return rows.mT @ rows / count


def _existing(name, module, inputs, gradient, mask) -> torch.Tensor:
    kind = kind_of(module)
    if kind in ("conv1d", "conv2d"):
        batched = gradient if gradient.ndim == len(module.kernel_size) + 2 else gradient[None]
        shape = (batched.shape[0], *batched.shape[2:])
    else:
        shape = inputs.shape if kind == "embedding" else inputs.shape[:-1]
    shape = torch.Size(shape or (1,))
    if mask is None:
        ones = torch.ones(shape, dtype=torch.bool, device=gradient.device)
        return ones.reshape(shape[0], -1)
    return existing_rows(mask.to(gradient.device), shape, name)
