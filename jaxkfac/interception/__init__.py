"""Find the layers of any JAX function; re-emit it with handlers in their place.

A function is traced to a jaxpr once (``trace``). One analysis of it (``_analysis``) classifies
every value:

- a **constant** depends on neither parameters nor data;
- a **parameter** is an input to find layers for;
- a **view** is a parameter whose elements were selected, renamed or scaled by constants
  (transposed, reshaped, cast, one slice of a scan), so that a gradient of the view is a gradient
  of the parameter; or it is an elementwise function of the parameter (``exp(w)``), whose gradient
  is that of the parameter after multiplication by a derivative;
- a **combined** value contains several parameters, each of them in view: an elementwise product,
  or arrays put side by side;
- a **derived** value depends on parameters alone and shows none of them (``w @ u``): where it
  meets data it is a weight of its own (``_uses``), and the parameters are behind it;
- **data** depends on data.

Where a view meets data, the equation is a *use* of the layer by its *kind* (``Kind``), or a row
of the coverage report. Every equation that reads a parameter is accounted for. This is the
completeness argument, and the reason why an unknown primitive is an error and not a guess.

A function that its user named (``layer``) is one equation, too: the kind that reads calls of its
name says where its parameters meet data.

**Axis atoms.** Every axis is a tuple of atoms, and an atom stands for one set of indices
(``values``). A union-find merges atoms that the program uses as one, a reshape splits them, and an
unknown primitive makes fresh ones. A mask of the outputs therefore finds the rows of an inner
layer by identity, never by equal sizes. Only axes of data propagate: a constant of shape
``(S, S)`` would make queries and keys the same axis.

**Plan and run.** The analysis leaves a plan: for each jaxpr, which equations are uses, views
or calls. ``Traced.run`` runs it through jit, checkpoint (with its policy), scan, cond and
shard_map, and runs all other equations unchanged. Each layer has a **slot** (``values.Slot``),
extra inputs that are propagated with its parameter. A scanned parameter has a stacked slot. If the
parameter is multiplied by a constant, each field of a record of statistics is multiplied by the
power of the constant that it declares (``values.entry``). A slot shaped like the parameter has a
derivative beside it instead, which is applied at the use. At a use the handler gets the site and
the operands, and returns the result. If its backward rule returns statistics as the cotangent of
the slot's ``sums``, differentiation sums them over uses and stacks them over iterations.

Analysis, emission and every other walk over a program are rules of one interpreter
(``jaxkfac._interpreter``).

**Marks.** A scalar loss can name its outputs (``mark_outputs``). The analysis determines which
layers lead to which mark (``leading_to``), and ``lifted`` runs the program so that it returns the
marked outputs.

Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxkfac import interception
    >>> from jaxkfac.interception import values
    >>> fn = lambda p, x: jnp.tanh(x @ (2 * p["w"]) + p["b"])
    >>> params, x = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, jnp.ones((5, 3))
    >>> traced = interception.trace(fn, params, x)
    >>> handler = lambda site, operands: site.bind(*operands) * site.slots[0].constants
    >>> slots = {"w": values.Slot(constants=jnp.ones(()))}
    >>> bool((traced.run(handler, params, slots, x) == fn(params, x)).all())
    True
"""

from jaxkfac._arguments import leaves_by_path, with_leaves
from jaxkfac.interception._convolutions import fast_convolutions
from jaxkfac.interception._custom import jaxpr_of
from jaxkfac.interception._examples import leading_to
from jaxkfac.interception._functions import Lookup
from jaxkfac.interception._kind import (
    Data,
    ElementDetail,
    Kind,
    LayerVjp,
    Reads,
    Site,
    Use,
    UseSite,
    kind_named,
    register_kind,
)
from jaxkfac.interception._layer import Layer, LayerTable, ParameterMatrix, selector
from jaxkfac.interception._mark_outputs import (
    Marked,
    OutputMark,
    check_likelihood,
    check_weights,
    lifted,
    mark_outputs,
    marks_of,
)
from jaxkfac.interception._named_layers import layer
from jaxkfac.interception._rewrite import Handler
from jaxkfac.interception._row_masks import RowMask, mark_rows
from jaxkfac.interception._trace import find_layers, trace, trace_marked
from jaxkfac.interception._trace_cache import Staged, TraceCache
from jaxkfac.interception._traced import Traced
from jaxkfac.interception._use_groups import scanned_by
from jaxkfac.interception._views import broadcast_axes, reversal

__all__ = [
    "Data",
    "ElementDetail",
    "Handler",
    "Kind",
    "Layer",
    "LayerTable",
    "LayerVjp",
    "Lookup",
    "Marked",
    "OutputMark",
    "ParameterMatrix",
    "Reads",
    "RowMask",
    "Site",
    "Staged",
    "TraceCache",
    "Traced",
    "Use",
    "UseSite",
    "broadcast_axes",
    "check_likelihood",
    "check_weights",
    "fast_convolutions",
    "find_layers",
    "jaxpr_of",
    "kind_named",
    "layer",
    "leading_to",
    "leaves_by_path",
    "lifted",
    "mark_outputs",
    "mark_rows",
    "marks_of",
    "register_kind",
    "reversal",
    "scanned_by",
    "selector",
    "trace",
    "trace_marked",
    "with_leaves",
]
