"""Curvature as matrix-free operators, and what can be asked of them."""

from jaxkfac.curvature.operators._batch_curvature import FisherType, fisher, ggn, hessian
from jaxkfac.curvature.operators._estimate import (
    Estimate,
    SpectralDensity,
    TraceMethod,
    log_determinant,
    spectral_density,
    trace,
)
from jaxkfac.curvature.operators._exact import ExactOperator
from jaxkfac.curvature.operators._kronecker import (
    FunctionOperator,
    KroneckerOperator,
    from_function,
    kronecker,
)
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._solve import Solution, solve
from jaxkfac.curvature.operators._spectrum import OperatorSpectrum, spectrum

__all__ = [
    "Estimate",
    "ExactOperator",
    "FisherType",
    "FunctionOperator",
    "KroneckerOperator",
    "Operator",
    "OperatorSpectrum",
    "Solution",
    "SpectralDensity",
    "TraceMethod",
    "fisher",
    "from_function",
    "ggn",
    "hessian",
    "kronecker",
    "log_determinant",
    "solve",
    "spectral_density",
    "spectrum",
    "trace",
]
