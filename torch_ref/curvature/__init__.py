"""Factors to spectra, and what is done with them."""

from torch_ref.curvature._apply import (
    apply_power,
    fisher_vector_product,
    natural_gradient,
)
from torch_ref.curvature._bases import LayerBasis, decompose_factors
from torch_ref.curvature._capacity import LayerCapacity, ModelCapacity, capacity_metrics
from torch_ref.curvature._ekfac import (
    MeasuredValues,
    apply_measured_power,
    measure_eigenvalues,
)
from torch_ref.curvature._jacobian import gram, jacobian, spring_direction
from torch_ref.curvature._lanczos import lanczos
from torch_ref.curvature._operator import KroneckerOperator

__all__ = [
    "KroneckerOperator",
    "LayerBasis",
    "LayerCapacity",
    "MeasuredValues",
    "ModelCapacity",
    "apply_measured_power",
    "apply_power",
    "capacity_metrics",
    "decompose_factors",
    "fisher_vector_product",
    "gram",
    "jacobian",
    "lanczos",
    "measure_eigenvalues",
    "natural_gradient",
    "spring_direction",
]
