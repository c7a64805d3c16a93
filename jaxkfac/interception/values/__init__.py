"""What the analysis knows of a value: axes, indices, views, slots, encoded parameters."""

from jaxkfac.interception.values._axes import (
    Atoms,
    Axes,
    AxisTable,
    UseAxes,
)
from jaxkfac.interception.values._encoded import (
    DeferredParameter,
    EncodedParameter,
    decoded_shapes,
    encoded_paths,
    is_encoded,
)
from jaxkfac.interception.values._index import (
    Index,
    Piece,
    Range,
    cuts_of,
    own_atoms,
    pieces_of,
    slices,
)
from jaxkfac.interception.values._slots import (
    Slot,
    Statistic,
    Window,
    entry,
    statistic,
)
from jaxkfac.interception.values._values import (
    View,
)

__all__ = [
    "Atoms",
    "Axes",
    "AxisTable",
    "DeferredParameter",
    "EncodedParameter",
    "Index",
    "Piece",
    "Range",
    "Slot",
    "Statistic",
    "UseAxes",
    "View",
    "Window",
    "cuts_of",
    "decoded_shapes",
    "encoded_paths",
    "entry",
    "is_encoded",
    "own_atoms",
    "pieces_of",
    "slices",
    "statistic",
]
