"""The kinds of layers, one class each: how a use is found, its rows, its squares, its slots."""

from jaxkfac.kinds._both_sides import LowRankMatrices
from jaxkfac.kinds._convolution import Convolution
from jaxkfac.kinds._dense import Dense
from jaxkfac.kinds._elementwise import Bias, Elementwise, Reparameterised, Scale, Uncovered
from jaxkfac.kinds._embedding import Embedding
from jaxkfac.kinds._experts import Gathered, Ragged
from jaxkfac.kinds._moments import EVERY_ROW, Precision, Products, output_moments, packs
from jaxkfac.kinds._named_layer import NamedLayer
from jaxkfac.kinds._rows import Rows, by_example, in_own_order, matrix_problem
from jaxkfac.kinds._squares import ArrayOrShape, Basis, in_unit, rotate_gradients
from jaxkfac.kinds._transformed import Transformed
from jaxkfac.kinds._two_sided import TwoSided

__all__ = [
    "EVERY_ROW",
    "ArrayOrShape",
    "Basis",
    "Bias",
    "Convolution",
    "Dense",
    "Elementwise",
    "Embedding",
    "Gathered",
    "LowRankMatrices",
    "NamedLayer",
    "Precision",
    "Products",
    "Ragged",
    "Reparameterised",
    "Rows",
    "Scale",
    "Transformed",
    "TwoSided",
    "Uncovered",
    "by_example",
    "in_own_order",
    "in_unit",
    "matrix_problem",
    "output_moments",
    "packs",
    "rotate_gradients",
]
