"""Where examples meet: batch statistics, contrastive losses, products along the batch.

An output that reads several examples has no gradient of one example alone. The analysis notes over
which atoms each equation sums, sorts or picks (``mixed_atoms``); whether those are the examples,
and whether the first output depends on such an equation, is asked only by whoever needs it.
"""

from collections.abc import Callable, Sequence
from typing import SupportsIndex

from jaxkfac.interception._axes import REDUCTIONS, Atoms
from jaxkfac.interception._compat import (
    Eqn,
    Jaxpr,
    body_of,
    branches_of,
    call_kind,
    is_var,
    scan_counts,
)
from jaxkfac.interception._propagate import Axes

_ALONG_ONE = {
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "sort": "dimension",
    "concatenate": "dimension",
    "split": "axis",
    "unstack": "axis",
}
_CUTS = frozenset("slice dynamic_slice pad dynamic_update_slice".split())


def mixed_atoms(eqn: Eqn, ins: Sequence[Axes | None]) -> Atoms:
    """Atoms of which one entry of the result reads several indices, or other ones.

    What an unknown primitive does is not said.

    Args:
        eqn: A first-order equation.
        ins: Axes of its operands; ``None`` marks those that do not depend on data.
    """
    axes_of = _mixed_axes(eqn)
    pairs = zip(ins, (*axes_of, *[()] * len(ins)), strict=False)
    return tuple(a for axes, mixed in pairs if axes is not None for d in mixed for a in axes[d])


def _mixed_axes(eqn: Eqn) -> Sequence[Sequence[SupportsIndex]]:
    """For each operand, the axes along which it is mixed."""
    name, params = eqn.primitive.name, eqn.params
    first = [v.aval.shape for v in eqn.invars[:1]]
    if name in REDUCTIONS:
        return (params["axes"],)
    if name in _ALONG_ONE:
        return [(params[_ALONG_ONE[name]],)] * len(eqn.invars)
    if name == "dot_general":
        return params["dimension_numbers"][0]
    if name == "rev":
        return (params["dimensions"],)
    if name in _CUTS:
        after = eqn.outvars[0].aval.shape
        return ([d for d, size in enumerate(first[0]) if size != after[d]],)
    if name == "conv_general_dilated":
        left, right, _ = params["dimension_numbers"]
        batch = left[:1] if params["batch_group_count"] > 1 else ()
        return ((*batch, *left[1:]), right[1:])
    if name.startswith("reduce_window"):
        return ([d for d, size in enumerate(params["window_dimensions"]) if size > 1],)
    if name == "fft":
        return (range(len(first[0]))[-len(params["fft_lengths"]) :],)
    if name == "gather":  # with several index axes, `x[arange(n), i]` may pick from each its own
        picked = params["dimension_numbers"].start_index_map
        return (picked if len(picked) == 1 else (),)
    if name.startswith("scatter"):
        numbers = params["dimension_numbers"]
        if len(numbers.scatter_dims_to_operand_dims) != 1:
            return ()
        rank = len(eqn.invars[2].aval.shape)
        return ((), (), [d for d in range(rank) if d not in numbers.update_window_dims])
    return ()


def visit_live(jaxpr: Jaxpr, wanted: Sequence[bool], visit: Callable[[Eqn], None]) -> list[bool]:
    """Visit, last one first, the equations that the wanted outputs depend on.

    Returns:
        Which inputs they depend on.
    """
    needed = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        wants, kind = [v in needed for v in eqn.outvars], call_kind(eqn)
        visit(eqn)
        reads = [True] * len(eqn.invars)
        if kind == "scan":
            reads = _live_scan(eqn, wants, visit)
        elif kind == "cond":
            each = [visit_live(branch, wants, visit) for branch, _ in branches_of(eqn)]
            reads = [True, *map(any, zip(*each, strict=True))]
        elif kind is not None and kind != "while":
            reads = visit_live(body_of(eqn)[0], wants, visit)
        needed |= {v for v, r in zip(eqn.invars, reads, strict=True) if r and is_var(v)}
    return [v in needed for v in jaxpr.invars]


def _live_scan(eqn: Eqn, wants: list[bool], visit: Callable[[Eqn], None]) -> list[bool]:
    body, (constants, carried) = body_of(eqn)[0], scan_counts(eqn)
    while True:  # a carry that is read makes what it was computed from needed before
        reads = visit_live(body, wants, lambda _: None)
        carries = reads[constants : constants + carried]
        grown = [*map(any, zip(carries, wants[:carried], strict=True)), *wants[carried:]]
        if grown == wants:
            visit_live(body, wants, visit)
            return reads
        wants = grown
