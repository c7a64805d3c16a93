"""Bound the condition number of a factor."""

import torch

from torch_ref.linalg._placement import eigh_where_it_fits
from torch_ref.linalg._spectrum import Spectrum, rebuild


def decompose(
    matrix: torch.Tensor,
    *,
    max_condition: float,
    damping: float,
    device: torch.device | str = "cpu",
) -> Spectrum:
    r"""Eigendecompose a factor and raise eigenvalues below $\max(\lambda_{\max}/\kappa, \delta)$.

    Args:
        matrix: Symmetric positive semi-definite ``(n, n)``, a stack ``(..., n, n)``, or the
            diagonal ``(n,)`` of one. No size is left out.
        max_condition: $\kappa \ge 1$.
        damping: $\delta \ge 0$, the smallest eigenvalue allowed.
        device: Where to decompose, if three matrices fit into half of its free memory; else,
            and after running out of memory there, the CPU does it.

    Returns:
        The spectrum, on the CPU.

    Raises:
        ValueError: arguments out of range, a matrix that is not square or not finite.
    """
    if max_condition < 1 or damping < 0:
        raise ValueError(
            f"expected max_condition >= 1 and damping >= 0, got {max_condition} and {damping}"
        )
    if matrix.ndim > 1 and matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"a factor is square or a diagonal, got the shape {tuple(matrix.shape)}")
    if not bool(matrix.isfinite().all()):
        bad = int((~matrix.isfinite()).sum())
        raise ValueError(
            f"{bad} of {matrix.numel()} entries are not finite; look for NaN in the batch, or for "
            "overflow in a float16 model (gram_dtype=torch.float32)"
        )
    matrix = matrix.cpu()
    if matrix.dtype in (torch.bfloat16, torch.float16):
        matrix = matrix.float()  # LAPACK has no half precision
    values, vectors = matrix, None
    if matrix.ndim > 1:
        values, vectors = eigh_where_it_fits(matrix, device)
    raw = values.clamp(min=0)
    floor = (raw.amax(-1, keepdim=True) / max_condition).clamp(min=damping)
    return Spectrum(torch.maximum(raw, floor), raw, vectors)


def stabilize(
    matrix: torch.Tensor,
    max_condition: float,
    damping: float,
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    r"""The matrix with the clipped eigenvalues of :func:`decompose`.

    $$ Q \operatorname{diag}(\max(\lambda, \lambda_{\max} / \kappa, \delta)) Q^\top $$

    Args:
        matrix: As in :func:`decompose`, on any device.
        max_condition: $\kappa \ge 1$.
        damping: $\delta \ge 0$, the smallest eigenvalue allowed.
        device: Where to decompose; see :func:`decompose`.

    Returns:
        A matrix like the one that came in: its shape, its dtype, its device. One in half
        precision is decomposed and put together in float32 and rounded once, at the end. That
        rounding moves an eigenvalue by about $2^{-8}$ (bfloat16) of the largest: a $\kappa$
        beyond some hundreds does not survive it.

    Raises:
        ValueError: as :func:`decompose`.

    Memory:
        It is put together on the CPU, so that the device holds the result and no product.

    Example:
        >>> import torch
        >>> stabilize(torch.diag(torch.tensor([4.0, 0.0])), max_condition=8.0, damping=0.1)
        tensor([[4.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    spectrum = decompose(matrix, max_condition=max_condition, damping=damping, device=device)
    clipped = spectrum.values
    if spectrum.vectors is not None:
        clipped = rebuild(spectrum.values, spectrum.vectors)
    return clipped.to(matrix.device, matrix.dtype)
