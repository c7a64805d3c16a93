"""Linear algebra of factors, in arrays only: Gram products, packed triangles, sums."""

from jaxkfac.linalg._gram import (
    PANELS_FROM,
    gram,
    gram_panels,
    has_panels,
    panel_shapes,
    statistics_dtype,
    symmetric_gram,
    unpack_panels,
)
from jaxkfac.linalg._packed import (
    diagonal,
    fold_triangle,
    is_folded,
    pack,
    packed_shape,
    unfold_triangle,
    unfolded,
    unfolded_size,
    unpack,
)
from jaxkfac.linalg._sums import (
    alike,
    inner_product,
    is_all_finite,
    map_over_chunks,
    sum_over_axis,
    sum_over_chunks,
)

__all__ = [
    "PANELS_FROM",
    "alike",
    "diagonal",
    "fold_triangle",
    "gram",
    "gram_panels",
    "has_panels",
    "inner_product",
    "is_all_finite",
    "is_folded",
    "map_over_chunks",
    "pack",
    "packed_shape",
    "panel_shapes",
    "statistics_dtype",
    "sum_over_axis",
    "sum_over_chunks",
    "symmetric_gram",
    "unfold_triangle",
    "unfolded",
    "unfolded_size",
    "unpack",
    "unpack_panels",
]
