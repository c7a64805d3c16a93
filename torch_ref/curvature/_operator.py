"""The Kronecker-factored Fisher as one symmetric matrix that is only ever multiplied."""

import math
from collections.abc import Mapping

import torch

from torch_ref.curvature._apply import apply_power
from torch_ref.curvature._bases import LayerBasis
from torch_ref.factors import LayerGradient


class KroneckerOperator:
    r"""A power of the block-diagonal $A \otimes G$ as an operator on flat vectors, for Lanczos.

    A vector holds the layers in the order of ``bases``; of each layer the weight, row after row
    (outputs first), then the bias where it has a block of its own. ``operator @ v`` gives a
    vector on the device and in the dtype of ``v``; the bases stay on the CPU.

    Args:
        bases: Of :func:`decompose_factors`.
        power: The real power; 1 is the Fisher itself, from raw eigenvalues.
        damping: $(\delta_A, \delta_G)$.
    """

    def __init__(
        self,
        bases: Mapping[str, LayerBasis],
        *,
        power: float = 1.0,
        damping: tuple[float, float] = (0.0, 0.0),
    ):
        self.bases = dict(bases)
        self.power = power
        self.damping = damping

    @property
    def shape(self) -> tuple[int, int]:
        """The number of parameters that have factors, twice."""
        size = sum(math.prod(shape) for _, _, shape in self._parts())
        return size, size

    def flatten(self, gradients: Mapping[str, LayerGradient]) -> torch.Tensor:
        """One vector of all layers."""
        parts = [getattr(gradients[name], part) for name, part, _ in self._parts()]
        return torch.cat([part.reshape(-1) for part in parts])

    def unflatten(self, vector: torch.Tensor) -> dict[str, LayerGradient]:
        """The layers of a vector: the inverse of :meth:`flatten`."""
        if vector.shape != self.shape[:1]:
            raise ValueError(f"expected a vector {self.shape[:1]}, got {tuple(vector.shape)}")
        parts = self._parts()
        pieces = vector.split([math.prod(shape) for _, _, shape in parts])
        found: dict[str, dict[str, torch.Tensor]] = {}
        for (name, part, shape), piece in zip(parts, pieces):
            found.setdefault(name, {})[part] = piece.reshape(shape)
        return {name: LayerGradient(**layer) for name, layer in found.items()}

    def __matmul__(self, vector: torch.Tensor) -> torch.Tensor:
        applied = apply_power(self.unflatten(vector), self.bases, self.power, damping=self.damping)
        return self.flatten(applied)

    def _parts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        parts = []
        for name, basis in self.bases.items():
            outputs = tuple(basis.g.values.shape)  # (out,) or (groups, out)
            parts.append((name, "weight", (*outputs, basis.a.size)))
            if basis.bias == "separate":
                parts.append((name, "bias", outputs))
        return parts
