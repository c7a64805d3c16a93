"""Kronecker factors: objectives, Fisher types, collection in passes."""

from jaxkfac.factors._budgeted import BudgetedCollector
from jaxkfac.factors._build import value_grad_and_factors
from jaxkfac.factors._collect import FactorCollector
from jaxkfac.factors._diagonal_pass import (
    apart_remedy,
    check_alone,
    gradient_rows,
    per_example_diagonals,
)
from jaxkfac.factors._fisher import (
    FISHER_TYPES,
    LABEL_FOLD,
    Estimator,
    check_label_values,
    estimator_of,
)
from jaxkfac.factors._gather import ValueGradAndFactors
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from jaxkfac.factors._loss_terms import Head, kept_targets, number_of_terms
from jaxkfac.factors._marks import MarkedTerms
from jaxkfac.factors._model_call import Batch, ModelCall, as_batch, returned, takes_key
from jaxkfac.factors._objective import Objective, arguments
from jaxkfac.factors._options import check_word
from jaxkfac.factors._passes import (
    Pass,
    PassPlan,
    balanced_groups,
    exchanged_bytes,
    largest_budget,
    plan_passes,
    smallest_budget,
)
from jaxkfac.factors._program import Linearised, Program
from jaxkfac.factors._scalar_loss import BatchCurvature
from jaxkfac.factors._statistics import Statistics

__all__ = [
    "FISHER_TYPES",
    "LABEL_FOLD",
    "Batch",
    "BatchCurvature",
    "Bernoulli",
    "BudgetedCollector",
    "Categorical",
    "Estimator",
    "FactorCollector",
    "Gaussian",
    "Head",
    "Likelihood",
    "Linearised",
    "MarkedTerms",
    "ModelCall",
    "Objective",
    "Pass",
    "PassPlan",
    "Program",
    "Statistics",
    "ValueGradAndFactors",
    "apart_remedy",
    "arguments",
    "as_batch",
    "balanced_groups",
    "check_alone",
    "check_label_values",
    "check_word",
    "estimator_of",
    "exchanged_bytes",
    "gradient_rows",
    "kept_targets",
    "largest_budget",
    "number_of_terms",
    "per_example_diagonals",
    "plan_passes",
    "returned",
    "smallest_budget",
    "takes_key",
    "value_grad_and_factors",
]
