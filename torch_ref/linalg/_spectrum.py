"""A clipped eigendecomposition, and powers of the matrix it stands for."""

from typing import NamedTuple

import torch


class Spectrum(NamedTuple):
    r"""Eigenvalues and eigenvectors of one factor, on the CPU.

    Attributes:
        values: Clipped, ``(..., n)``.
        raw_values: As decomposed, negative rounding errors set to 0.
        vectors: In columns ``(..., n, n)``; ``None`` for a diagonal, whose entries the values
            are, in their own order.
    """

    values: torch.Tensor
    raw_values: torch.Tensor
    vectors: torch.Tensor | None

    @property
    def size(self) -> int:
        """n, how many rows the factor has."""
        return self.values.shape[-1]

    def power(self, exponent: float, damping: float = 0.0) -> torch.Tensor:
        r"""$Q (\lambda + \delta)^p Q^\top$, or for a diagonal the vector $(\lambda + \delta)^p$.

        Negative powers take clipped eigenvalues, others raw ones. Zero to a negative power is
        0: the pseudo-inverse.
        """
        values = (self.values if exponent < 0 else self.raw_values) + damping
        powered = values**exponent
        if exponent < 0:
            powered = torch.where(values > 0, powered, 0.0)
        return powered if self.vectors is None else rebuild(powered, self.vectors)


def rebuild(values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    r"""$Q \operatorname{diag}(\lambda) Q^\top$."""
    return (vectors * values[..., None, :]) @ vectors.mT
