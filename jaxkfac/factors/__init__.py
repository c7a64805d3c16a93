"""Kronecker factors: objectives, Fisher types, collection, averages."""

from jaxkfac.factors._average import update_average
from jaxkfac.factors._budgeted import BudgetedCollector
from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._collect import FactorCollector, ValueGradAndFactors
from jaxkfac.factors._diagonal_pass import per_example_diagonals
from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._example_sums import gradient_rows
from jaxkfac.factors._factors import DiagonalFactor, Factors, KroneckerFactor
from jaxkfac.factors._fisher import FISHER_TYPES, estimator_of
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from jaxkfac.factors._objective import Objective, as_batch
from jaxkfac.factors._program import Leaves, Program
from jaxkfac.factors._statistics import Statistics
from jaxkfac.factors._taps import Slot

__all__ = [
    "FISHER_TYPES",
    "Bernoulli",
    "BudgetedCollector",
    "Categorical",
    "DiagonalFactor",
    "Estimator",
    "FactorCollector",
    "Factors",
    "Gaussian",
    "KroneckerFactor",
    "Leaves",
    "Likelihood",
    "Objective",
    "Program",
    "Slot",
    "Statistics",
    "ValueGradAndFactors",
    "as_batch",
    "estimator_of",
    "gradient_rows",
    "per_example_diagonals",
    "update_average",
    "value_grad_and_factors",
]
