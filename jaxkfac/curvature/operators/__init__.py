"""Curvature as matrix-free operators, and what can be asked of them."""

from jaxkfac.curvature.operators._estimate import Estimate
from jaxkfac.curvature.operators._exact import ExactOperator
from jaxkfac.curvature.operators._fisher import FisherType, fisher
from jaxkfac.curvature.operators._function import FunctionOperator, from_function
from jaxkfac.curvature.operators._ggn import ggn
from jaxkfac.curvature.operators._hessian import hessian
from jaxkfac.curvature.operators._kronecker import KroneckerOperator, kronecker
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._quadrature import (
    SpectralDensity,
    log_determinant,
    spectral_density,
)
from jaxkfac.curvature.operators._solve import Solution, solve
from jaxkfac.curvature.operators._spectrum import OperatorSpectrum, spectrum
from jaxkfac.curvature.operators._trace import TraceMethod, trace

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
