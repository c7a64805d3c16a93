"""A block-diagonal Kronecker matrix as a value: sides, sums and counts, origins, averages.

Nothing here knows how they are collected.
"""

from jaxkfac.blocks._average import (
    PLAIN_TERMS,
    LongSum,
    arrays_of_turn,
    check_decay,
    check_factors,
    check_like,
    check_same_layers,
    shapes_of_turn,
    update_average,
    with_arrays_of_turn,
    zeros_like,
)
from jaxkfac.blocks._corrections import (
    Corrections,
    MeasuredValues,
    corrections_of,
)
from jaxkfac.blocks._factors import (
    DiagonalFactor,
    Factors,
    KroneckerFactor,
    of_parameters,
    places_of,
    stored_like,
    with_origin,
    without_corrections,
    without_loss_terms,
    without_turn,
)
from jaxkfac.blocks._layout import EigenBlock, Entry, Layout, layout_of
from jaxkfac.blocks._origin import (
    Origin,
    Turn,
    check_all_layers,
    check_same_origin,
    check_turn,
    number_of_turns,
)
from jaxkfac.blocks._sides import (
    BiasMode,
    BlockKronecker,
    Place,
    Side,
    Sides,
    over_stack,
)

__all__ = [
    "PLAIN_TERMS",
    "BiasMode",
    "BlockKronecker",
    "Corrections",
    "DiagonalFactor",
    "EigenBlock",
    "Entry",
    "Factors",
    "KroneckerFactor",
    "Layout",
    "LongSum",
    "MeasuredValues",
    "Origin",
    "Place",
    "Side",
    "Sides",
    "Turn",
    "arrays_of_turn",
    "check_all_layers",
    "check_decay",
    "check_factors",
    "check_like",
    "check_same_layers",
    "check_same_origin",
    "check_turn",
    "corrections_of",
    "layout_of",
    "number_of_turns",
    "of_parameters",
    "over_stack",
    "places_of",
    "shapes_of_turn",
    "stored_like",
    "update_average",
    "with_arrays_of_turn",
    "with_origin",
    "without_corrections",
    "without_loss_terms",
    "without_turn",
    "zeros_like",
]
