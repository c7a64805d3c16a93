"""Readings of a parameter that a derivative inside of the program makes once more.

``jax.checkpoint`` keeps no products of what it surrounds, and a derivative in reverse computes them
again. Where that derivative stands inside of the program (the residual of a differential equation),
so do both products. One row of input then has two readings, each with a part of its cotangent:
counted as two rows, A weighs it double, and G is the sum of two squares in place of the square of
a sum. The statistics would depend on where the program saves memory.
"""

from collections.abc import Iterator, Sequence

from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._compat import call_kind, recomputes
from jaxkfac.interception._plan import Plan
from jaxkfac.interception._reach import leading_to
from jaxkfac.interception._values import CoverageNote, Use

_REASON = (
    "is read again where a derivative inside of the function recomputes what `jax.checkpoint` did "
    "not keep, which would count its rows twice: put `jax.checkpoint` around the derivative, not "
    "around what is derived"
)


def split_recomputed(
    analysis: Analysis, uses: Sequence[Use], *, num_outputs: int
) -> tuple[list[Use], list[CoverageNote]]:
    """The uses without those of parameters that are read a second time for one derivative.

    A first reading that leads to no output counts nothing: a checkpoint around the whole of what
    is derived has one reading, the second.
    """
    again = {id(use) for use in _recomputed(analysis.plan)}
    lost: dict[str, None] = {}
    for output in range(num_outputs or len(analysis.outputs)) if again else ():
        read, reread = {}, {}
        for use in leading_to(analysis.plan, output)[0]:
            place = (use.view.path, use.kind.name, use.in_axes)
            (reread if id(use) in again else read)[place] = use
        for use in (reread[place] for place in read.keys() & reread.keys()):
            lost |= dict.fromkeys(use.view.computed_from or (use.view.path,))
    kept = [u for u in uses if lost.keys().isdisjoint((u.view.path, *u.view.computed_from))]
    return kept, [CoverageNote(path, _REASON, fatal=True) for path in lost]


def _recomputed(plan: Plan) -> Iterator[Use]:
    for position, inner in plan.calls.items():
        eqn = plan.jaxpr.eqns[position]
        if recomputes(eqn):
            yield from inner.all_uses()
            continue
        for body in inner.calls.values() if call_kind(eqn) == "cond" else [inner]:
            yield from _recomputed(body)
