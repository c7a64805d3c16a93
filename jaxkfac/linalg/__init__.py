"""Linear algebra of factors, in arrays only: clipped eigh and Kronecker powers."""

from jaxkfac.linalg._chunks import map_over_chunks, sum_over_chunks
from jaxkfac.linalg._damping import (
    Damping,
    DampingMode,
    ScaledPower,
    block_root,
    check_damping,
    diagonal_power,
    factor_damping,
    is_separable,
    kronecker_power,
    measured_power,
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
from jaxkfac.linalg._eigh_host import HostDType, HostSpectrum, eigh_on_host, host_dtype
from jaxkfac.linalg._gram import (
    PANELS_FROM,
    gram,
    gram_panels,
    has_panels,
    panel_shapes,
    statistics_dtype,
    symmetric_gram,
    unpack_panels,
)
from jaxkfac.linalg._inverse import damped_inverse, diagonal, traces
from jaxkfac.linalg._kronecker import (
    from_spectrum,
    into_eigenbasis,
    out_of_eigenbasis,
    quadratic_form,
    scale_in_eigenbasis,
)
from jaxkfac.linalg._orthogonal_iteration import iterate_eigenvectors
from jaxkfac.linalg._packed import pack, packed_shape, unpack
from jaxkfac.linalg._rcond import above_rcond, check_rcond, kronecker_above_rcond
from jaxkfac.linalg._sums import alike, inner_product, is_all_finite
from jaxkfac.linalg._triangle import fold_triangle, unfold_triangle

__all__ = [
    "PANELS_FROM",
    "ClippedEigh",
    "Damping",
    "DampingMode",
    "HostDType",
    "HostSpectrum",
    "ScaledPower",
    "Spectrum",
    "above_rcond",
    "alike",
    "block_root",
    "check_clipping",
    "check_damping",
    "check_rcond",
    "check_square",
    "clip_eigenvalues",
    "damped_inverse",
    "diagonal",
    "diagonal_power",
    "eigh_checked",
    "eigh_clipped",
    "eigh_in_turn",
    "eigh_on_host",
    "factor_damping",
    "fold_triangle",
    "from_spectrum",
    "gram",
    "gram_panels",
    "has_panels",
    "host_dtype",
    "in_sequence",
    "inner_product",
    "into_eigenbasis",
    "is_all_finite",
    "is_separable",
    "iterate_eigenvectors",
    "kronecker_above_rcond",
    "kronecker_power",
    "map_over_chunks",
    "measured_power",
    "out_of_eigenbasis",
    "pack",
    "packed_shape",
    "panel_shapes",
    "power_or_zero",
    "quadratic_form",
    "scale_in_eigenbasis",
    "statistics_dtype",
    "sum_over_chunks",
    "symmetric_gram",
    "traces",
    "unfold_triangle",
    "unpack",
    "unpack_panels",
]
