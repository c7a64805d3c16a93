"""Gradients of single examples: what taps gather of them, Jacobians and their Gram matrices."""

from jaxkfac.curvature.per_example._example_gradients import (
    ExampleGradients,
    Queries,
    block_dtype,
    check_readings,
    leaves_out_readings,
    read_many,
    refuse_meeting,
    write_many,
)
from jaxkfac.curvature.per_example._gram_plan import GramPlan
from jaxkfac.curvature.per_example._jacobian import Jacobian, gram, jacobian
from jaxkfac.curvature.per_example._jacobian_rows import RowSource
from jaxkfac.curvature.per_example._row_products import GatheredProducts

__all__ = [
    "ExampleGradients",
    "GatheredProducts",
    "GramPlan",
    "Jacobian",
    "Queries",
    "RowSource",
    "block_dtype",
    "check_readings",
    "gram",
    "jacobian",
    "leaves_out_readings",
    "read_many",
    "refuse_meeting",
    "write_many",
]
