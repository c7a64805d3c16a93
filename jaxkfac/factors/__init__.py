"""Kronecker factors: objectives, Fisher types, collection, averages."""

from jaxkfac.factors._average import (
    PLAIN_TERMS,
    LongSum,
    arrays_of_turn,
    check_decay,
    check_factors,
    check_like,
    check_same_layers,
    layer_difference,
    shapes_of_turn,
    update_average,
    with_arrays_of_turn,
    zeros_like,
)
from jaxkfac.factors._budgeted import BudgetedCollector
from jaxkfac.factors._build import check_word, value_grad_and_factors
from jaxkfac.factors._collect import FactorCollector, ValueGradAndFactors
from jaxkfac.factors._corrections import Corrections, MeasuredValues
from jaxkfac.factors._diagonal_pass import (
    apart_remedy,
    check_alone,
    per_example_diagonals,
)
from jaxkfac.factors._factors import (
    BiasMode,
    DiagonalFactor,
    Factors,
    KroneckerFactor,
    mean_of,
    of_parameters,
    packed_matrix,
    stored_like,
    with_origin,
    without_corrections,
    without_loss_terms,
    without_turn,
)
from jaxkfac.factors._fisher import (
    FISHER_TYPES,
    LABEL_FOLD,
    Estimator,
    check_label_values,
    estimator_of,
    over_count,
)
from jaxkfac.factors._likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from jaxkfac.factors._loss_terms import Head, kept_targets, number_kept
from jaxkfac.factors._marks import MarkedTerms
from jaxkfac.factors._objective import (
    Batch,
    ModelCall,
    Objective,
    arguments,
    as_batch,
    returned,
    takes_key,
)
from jaxkfac.factors._origin import (
    Origin,
    check_all_layers,
    check_same_origin,
    check_turn,
    number_of_turns,
)
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
from jaxkfac.factors._taps import gradient_rows

__all__ = [
    "FISHER_TYPES",
    "LABEL_FOLD",
    "PLAIN_TERMS",
    "Batch",
    "BatchCurvature",
    "Bernoulli",
    "BiasMode",
    "BudgetedCollector",
    "Categorical",
    "Corrections",
    "DiagonalFactor",
    "Estimator",
    "FactorCollector",
    "Factors",
    "Gaussian",
    "Head",
    "KroneckerFactor",
    "Likelihood",
    "Linearised",
    "LongSum",
    "MarkedTerms",
    "MeasuredValues",
    "ModelCall",
    "Objective",
    "Origin",
    "Pass",
    "PassPlan",
    "Program",
    "Statistics",
    "ValueGradAndFactors",
    "apart_remedy",
    "arguments",
    "arrays_of_turn",
    "as_batch",
    "balanced_groups",
    "check_all_layers",
    "check_alone",
    "check_decay",
    "check_factors",
    "check_label_values",
    "check_like",
    "check_same_layers",
    "check_same_origin",
    "check_turn",
    "check_word",
    "estimator_of",
    "exchanged_bytes",
    "gradient_rows",
    "kept_targets",
    "largest_budget",
    "mean_of",
    "number_kept",
    "number_of_turns",
    "of_parameters",
    "over_count",
    "packed_matrix",
    "per_example_diagonals",
    "plan_passes",
    "returned",
    "shapes_of_turn",
    "smallest_budget",
    "stored_like",
    "takes_key",
    "update_average",
    "value_grad_and_factors",
    "with_arrays_of_turn",
    "with_origin",
    "without_corrections",
    "without_loss_terms",
    "without_turn",
    "zeros_like",
]
