"""Find the layers of any JAX function; re-emit it with handlers in their place."""

from jaxkfac.interception._kind import Kind, kind_named, register_kind
from jaxkfac.interception._layer import Layer, ParameterMatrix
from jaxkfac.interception._nnx import NnxApply, from_nnx
from jaxkfac.interception._rewrite import Handler, Site
from jaxkfac.interception._rows import mark_rows
from jaxkfac.interception._slots import SlotEntry
from jaxkfac.interception._table import LayerTable
from jaxkfac.interception._trace import Traced, find_layers, trace

__all__ = [
    "Handler",
    "Kind",
    "Layer",
    "LayerTable",
    "NnxApply",
    "ParameterMatrix",
    "Site",
    "SlotEntry",
    "Traced",
    "find_layers",
    "from_nnx",
    "kind_named",
    "mark_rows",
    "register_kind",
    "trace",
]
