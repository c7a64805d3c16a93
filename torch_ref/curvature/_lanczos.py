"""The extreme eigenvalues of a symmetric operator."""

from typing import Protocol

import torch


class Operator(Protocol):
    """Anything square that multiplies vectors, such as :class:`KroneckerOperator`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor: ...


def lanczos(
    operator: Operator,
    num_steps: int,
    *,
    start: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> torch.Tensor:
    r"""Ritz values after ``num_steps`` products, each vector made orthogonal to all before it.

    Args:
        operator: Symmetric, n × n.
        num_steps: Products; beyond n there is nothing left to find, and it stops there.
        start: First vector ``(n,)``; ``None`` draws one on the CPU.
        dtype: Of the drawn vector.
        seed: Of the drawn vector.

    Returns:
        Ascending Ritz values; the largest and the smallest approach the operator's from inside.

    Memory:
        ``num_steps`` vectors.
    """
    n = operator.shape[0]
    if start is None:
        start = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    basis = [start / start.norm()]
    diagonal, beside = [], []
    scale = 0.0
    for _ in range(min(num_steps, n)):
        w = operator @ basis[-1]
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once leaves rounding errors that the second pass removes
            for q in basis:
                w = w - (w @ q) * q
        norm = float(w.norm())
        scale = max(scale, abs(diagonal[-1]), norm)
        if norm <= n * torch.finfo(w.dtype).eps * scale:
            break  # the Krylov space is exhausted: what was found is exact
        beside.append(norm)
        basis.append(w / norm)
    steps = len(diagonal)
    off = torch.tensor(beside[: steps - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    tridiagonal += torch.diag(off, 1) + torch.diag(off, -1)
    return torch.linalg.eigvalsh(tridiagonal)
