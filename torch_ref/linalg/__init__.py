"""Clipped eigendecompositions of factors, on the device where they fit."""

from torch_ref.linalg._placement import eigh_where_it_fits, fits_on_device
from torch_ref.linalg._spectrum import Spectrum, rebuild
from torch_ref.linalg._stabilize import decompose, stabilize

__all__ = [
    "Spectrum",
    "decompose",
    "eigh_where_it_fits",
    "fits_on_device",
    "rebuild",
    "stabilize",
]
