"""Decompose the factors of every layer."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from torch_ref.factors import LayerFactors
from torch_ref.linalg import Spectrum, decompose


class LayerBasis(NamedTuple):
    """Both spectra of a layer, on the CPU.

    Attributes:
        a: Of A; of an embedding without vectors.
        g: Of G.
        bias: As in :class:`LayerFactors`.
    """

    a: Spectrum
    g: Spectrum
    bias: Literal["joint", "separate", "none"]


def decompose_factors(
    factors: Mapping[str, LayerFactors],
    *,
    max_condition: float = 1e6,
    damping: float = 0.0,
    device: torch.device | str = "cpu",
) -> dict[str, LayerBasis]:
    """Clipped spectra of all factors; see :func:`torch_ref.linalg.decompose`.

    Returns:
        A basis for every layer. None is skipped, whatever its size.

    Raises:
        ValueError: naming the layer and the factor that cannot be decomposed.
    """
    bases = {}
    for name, layer in factors.items():
        spectra = []
        for side in ("a", "g"):
            try:
                spectrum = decompose(
                    getattr(layer, side),
                    max_condition=max_condition,
                    damping=damping,
                    device=device,
                )
            except ValueError as error:
                raise ValueError(f"layer {name!r}, factor {side}: {error}") from error
            spectra.append(spectrum)
        bases[name] = LayerBasis(*spectra, layer.bias)
    return bases
