"""Curvature and adapters for JAX, inside a memory budget."""

from jaxkfac._errors import (
    CheckpointMismatchError,
    JaxkfacError,
    LostRowsError,
    NonFiniteFactorError,
    UncoveredParameterError,
    UnknownLayerError,
)
from jaxkfac.curvature import (
    Eigenbases,
    apply_power,
    eigendecompose,
    fisher_vector_product,
    natural_gradient,
    reconstruct,
)
from jaxkfac.factors import (
    Bernoulli,
    Categorical,
    DiagonalFactor,
    Factors,
    Gaussian,
    KroneckerFactor,
    Objective,
    update_average,
    value_grad_and_factors,
)
from jaxkfac.interception import Layer, LayerTable, find_layers, from_nnx, mark_rows
from jaxkfac.optim import has_updated, kfac, multi_steps, scale_by_bases

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "CheckpointMismatchError",
    "DiagonalFactor",
    "Eigenbases",
    "Factors",
    "Gaussian",
    "JaxkfacError",
    "KroneckerFactor",
    "Layer",
    "LayerTable",
    "LostRowsError",
    "NonFiniteFactorError",
    "Objective",
    "UncoveredParameterError",
    "UnknownLayerError",
    "apply_power",
    "eigendecompose",
    "find_layers",
    "fisher_vector_product",
    "from_nnx",
    "has_updated",
    "kfac",
    "mark_rows",
    "multi_steps",
    "natural_gradient",
    "reconstruct",
    "scale_by_bases",
    "update_average",
    "value_grad_and_factors",
]
