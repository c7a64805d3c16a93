"""What curvature is for: influence and Laplace; and a trial of it all."""

from jaxkfac.uses._check_coverage import CoverageCheck, check_coverage
from jaxkfac.uses._gradient_store import GradientStore, gradient_store
from jaxkfac.uses._influence import TopK, TruncatedScores, influence, scores_of_batches
from jaxkfac.uses._kronfluence import load_kronfluence
from jaxkfac.uses._laplace import laplace
from jaxkfac.uses._laplace_posterior import LaplacePosterior
from jaxkfac.uses._linearised_variance import GaussianPrediction
from jaxkfac.uses._posterior_precision import LogLikelihood
from jaxkfac.uses._quadratic_penalty import QuadraticPenalty, quadratic_penalty
from jaxkfac.uses._queries import prepare_queries
from jaxkfac.uses._self_influence import self_influence

__all__ = [
    "CoverageCheck",
    "GaussianPrediction",
    "GradientStore",
    "LaplacePosterior",
    "LogLikelihood",
    "QuadraticPenalty",
    "TopK",
    "TruncatedScores",
    "check_coverage",
    "gradient_store",
    "influence",
    "laplace",
    "load_kronfluence",
    "prepare_queries",
    "quadratic_penalty",
    "scores_of_batches",
    "self_influence",
]
