"""What curvature is for: influence functions, Laplace approximations."""

from jaxkfac.uses._evidence import LogLikelihood
from jaxkfac.uses._influence import influence
from jaxkfac.uses._laplace import laplace
from jaxkfac.uses._laplace_posterior import LaplacePosterior
from jaxkfac.uses._predictive import GaussianPrediction
from jaxkfac.uses._self_influence import self_influence
from jaxkfac.uses._top_k import TopK

__all__ = [
    "GaussianPrediction",
    "LaplacePosterior",
    "LogLikelihood",
    "TopK",
    "influence",
    "laplace",
    "self_influence",
]
