"""Kronecker factors: objectives, Fisher types, collection, averages."""

from jaxkfac.factors._average import update_average
from jaxkfac.factors._budgeted import BudgetedCollector
from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._collect import FactorCollector, ValueGradAndFactors
from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._factors import DiagonalFactor, Factors, KroneckerFactor
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from jaxkfac.factors._objective import Objective

__all__ = [
    "Bernoulli",
    "BudgetedCollector",
    "Categorical",
    "DiagonalFactor",
    "Estimator",
    "FactorCollector",
    "Factors",
    "Gaussian",
    "KroneckerFactor",
    "Likelihood",
    "Objective",
    "ValueGradAndFactors",
    "update_average",
    "value_grad_and_factors",
]
