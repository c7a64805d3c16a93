"""Linear algebra of factors, in arrays only: clipped eigh and Kronecker powers."""

from jaxkfac.linalg._cut import above_cut, check_cut, kronecker_above_cut
from jaxkfac.linalg._damping import (
    Damping,
    DampingMode,
    check_damping,
    diagonal_power,
    kronecker_damping,
    kronecker_power,
    power_or_zero,
)
from jaxkfac.linalg._eigh import (
    ClippedEigh,
    Spectrum,
    check_clipping,
    check_square,
    clip_eigenvalues,
    eigh_checked,
    eigh_clipped,
    eigh_in_turn,
    in_sequence,
)
from jaxkfac.linalg._eigh_host import HostSpectrum, eigh_on_host
from jaxkfac.linalg._kronecker import (
    from_spectrum,
    into_eigenbasis,
    out_of_eigenbasis,
    scale_in_eigenbasis,
)
from jaxkfac.linalg._triangle import fold_triangle, unfold_triangle

__all__ = [
    "ClippedEigh",
    "Damping",
    "DampingMode",
    "HostSpectrum",
    "Spectrum",
    "above_cut",
    "check_clipping",
    "check_cut",
    "check_damping",
    "check_square",
    "clip_eigenvalues",
    "diagonal_power",
    "eigh_checked",
    "eigh_clipped",
    "eigh_in_turn",
    "eigh_on_host",
    "fold_triangle",
    "from_spectrum",
    "in_sequence",
    "into_eigenbasis",
    "kronecker_above_cut",
    "kronecker_damping",
    "kronecker_power",
    "out_of_eigenbasis",
    "power_or_zero",
    "scale_in_eigenbasis",
    "unfold_triangle",
]
