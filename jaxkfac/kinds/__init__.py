"""The kinds of layers, one class each: how a use is found, its rows, its squares, its slots."""

from jaxkfac.kinds._both_sides import BasisSquares, Gradients, LowRankMatrices, RowSums, Scores
from jaxkfac.kinds._convolution import Convolution
from jaxkfac.kinds._dense import Dense
from jaxkfac.kinds._elementwise import (
    Bias,
    ElementGradients,
    ElementSquares,
    Elementwise,
    Reparameterised,
    Scale,
    Uncovered,
)
from jaxkfac.kinds._embedding import Embedding
from jaxkfac.kinds._experts import Gathered, Ragged
from jaxkfac.kinds._moments import (
    EVERY_ROW,
    InputMoments,
    InputRows,
    Moment,
    Precision,
    Products,
    SideSums,
    output_moments,
    packs,
)
from jaxkfac.kinds._named_layer import NamedLayer
from jaxkfac.kinds._rows import Rows, example_counts, example_sums, in_own_order, matrix_problem
from jaxkfac.kinds._squares import ArrayOrShape, Basis, in_unit, rotate_gradients
from jaxkfac.kinds._transformed import Transformed
from jaxkfac.kinds._two_sided import TwoSided

__all__ = [
    "EVERY_ROW",
    "ArrayOrShape",
    "Basis",
    "BasisSquares",
    "Bias",
    "Convolution",
    "Dense",
    "ElementGradients",
    "ElementSquares",
    "Elementwise",
    "Embedding",
    "Gathered",
    "Gradients",
    "InputMoments",
    "InputRows",
    "LowRankMatrices",
    "Moment",
    "NamedLayer",
    "Precision",
    "Products",
    "Ragged",
    "Reparameterised",
    "RowSums",
    "Rows",
    "Scale",
    "Scores",
    "SideSums",
    "Transformed",
    "TwoSided",
    "Uncovered",
    "example_counts",
    "example_sums",
    "in_own_order",
    "in_unit",
    "matrix_problem",
    "output_moments",
    "packs",
    "rotate_gradients",
]
