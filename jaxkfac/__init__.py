"""Curvature and adapters for JAX, inside a memory budget."""

from jaxkfac import lslora, memory
from jaxkfac._errors import (
    CheckpointMismatchError,
    CoupledExamplesError,
    DamagedFileError,
    JaxkfacError,
    LostRowsError,
    NonFiniteFactorError,
    UncoveredParameterError,
    UnknownLayerError,
)
from jaxkfac.curvature import (
    CapacityMetrics,
    Eigenbases,
    HostCurvature,
    apply_power,
    capacity_interval,
    capacity_metrics,
    compare_capacity,
    correct_eigenvalues,
    eigendecompose,
    fisher_vector_product,
    natural_gradient,
    operators,
    reconstruct,
)
from jaxkfac.curvature.operators import spectrum
from jaxkfac.factors import (
    Bernoulli,
    Categorical,
    DiagonalFactor,
    Factors,
    Gaussian,
    KroneckerFactor,
    LongSum,
    Objective,
    update_average,
    value_grad_and_factors,
)
from jaxkfac.interception import Layer, LayerTable, as_state, find_layers, from_nnx, mark_rows
from jaxkfac.lslora import nf4
from jaxkfac.memory import MemoryBudgetError, cast_once, load_safetensors, place_once
from jaxkfac.optim import has_updated, kfac, multi_steps, scale_by_bases
from jaxkfac.planning import MemoryPlan, plan_memory

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "CapacityMetrics",
    "Categorical",
    "CheckpointMismatchError",
    "CoupledExamplesError",
    "DamagedFileError",
    "DiagonalFactor",
    "Eigenbases",
    "Factors",
    "Gaussian",
    "HostCurvature",
    "JaxkfacError",
    "KroneckerFactor",
    "Layer",
    "LayerTable",
    "LongSum",
    "LostRowsError",
    "MemoryBudgetError",
    "MemoryPlan",
    "NonFiniteFactorError",
    "Objective",
    "UncoveredParameterError",
    "UnknownLayerError",
    "apply_power",
    "as_state",
    "capacity_interval",
    "capacity_metrics",
    "cast_once",
    "compare_capacity",
    "correct_eigenvalues",
    "eigendecompose",
    "find_layers",
    "fisher_vector_product",
    "from_nnx",
    "has_updated",
    "kfac",
    "load_safetensors",
    "lslora",
    "mark_rows",
    "memory",
    "multi_steps",
    "natural_gradient",
    "nf4",
    "operators",
    "place_once",
    "plan_memory",
    "reconstruct",
    "scale_by_bases",
    "spectrum",
    "update_average",
    "value_grad_and_factors",
]
