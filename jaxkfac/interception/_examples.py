"""Uses whose rows do not run along the examples: their statistics would be wrong."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._axes import Atoms, Axes, AxisTable
from jaxkfac.interception._compat import ClosedJaxpr, call_kind, is_var, recomputes, scan_counts
from jaxkfac.interception._constant_rows import Repeats, repeated, repeats
from jaxkfac.interception._index import pieces_of
from jaxkfac.interception._kind import Data, Use
from jaxkfac.interception._layer import EXAMPLES_LOST
from jaxkfac.interception._plan import Plan
from jaxkfac.interception._row_masks import own_axes
from jaxkfac.interception._structured import MODIFIED
from jaxkfac.interception._values import CoverageNote

# ---------------- which layer uses lead to which outputs of a program


def leading_to(
    plan: Plan, *outputs: int, past: Collection[int] = ()
) -> tuple[list[Use], frozenset[int]]:
    """The uses that some outputs depend on, and the inputs.

    ``past`` are inputs that functions with a derivative of their own read: what leads to an output
    through one of these does not count.
    """
    uses: dict[int, Use] = {}
    inputs = _inputs(plan, outputs, uses, past)
    return list(uses.values()), frozenset(inputs)


def _inputs(
    plan: Plan, outputs: Iterable[int], uses: dict[int, Use], past: Collection[int] = ()
) -> set[int]:
    """Positions of the inputs that some outputs depend on; uses on the way are noted."""
    jaxpr = plan.jaxpr
    walls = {jaxpr.invars[k] for k in past}
    live = {v for k in outputs if is_var(v := jaxpr.outvars[k])}
    for position in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[position]
        wanted = {k for k, v in enumerate(eqn.outvars) if v in live}
        if not wanted or eqn.primitive.name == "stop_gradient":
            continue
        within = [k for k, v in enumerate(eqn.invars) if is_var(v) and v in walls]
        if within and call_kind(eqn) == "custom":
            continue
        uses.update((id(use), use) for use in plan.uses.get(position, ()))
        read = set(range(len(eqn.invars)))
        if position in plan.calls:
            inner, kind = plan.calls[position], call_kind(eqn)
            uses.update((id(use), use) for use in inner.entries.values())
            if kind == "scan":
                read = _inputs_of_scan(inner, *scan_counts(eqn), wanted, uses)
            elif kind == "cond":
                branches = [_inputs(branch, wanted, uses) for branch in inner.calls.values()]
                read = {0}.union(*({k + 1 for k in operands} for operands in branches))
            elif kind == "custom":  # a rule has other operands and results than its function
                uses.update((id(use), use) for use in inner.all_uses())
            else:
                read = _inputs(inner, wanted, uses, within)
        live |= {v for k in read if is_var(v := eqn.invars[k])}
    return {k for k, v in enumerate(jaxpr.invars) if v in live}


def _inputs_of_scan(
    body: Plan, constants: int, carries: int, wanted: set[int], uses: dict[int, Use]
) -> set[int]:
    """Of a scan: a carry that an iteration reads is one that the iteration before returns."""
    while True:
        read = _inputs(body, wanted, uses)
        more = {k - constants for k in read if constants <= k < constants + carries}
        if more <= wanted:
            return read
        wanted = wanted | more


# ---------------- readings of a parameter that a derivative inside of the program makes once more
#
# ``jax.checkpoint`` keeps no products of what it surrounds, and a derivative in reverse computes
# them again. Where that derivative stands inside of the program (the residual of a differential
# equation), so do both products. One row of input then has two readings, each with a part of its
# cotangent: counted as two rows, A weighs it double, and G is the sum of two squares in place of
# the square of a sum. The statistics would depend on where the program saves memory.


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


# ----------------


_OF_ROWS = frozenset("mul div add sub add_any".split())


def analyse(
    closed: ClosedJaxpr,
    paths: list[str | None],
    *,
    num_outputs: int = 0,
    state: frozenset[int] = frozenset(),
) -> tuple[ClosedJaxpr, Analysis]:
    """A traced function and its analysis, constants told apart from rows.

    A constant times a parameter is a layer use where its rows are the examples (the zeros that
    a recurrent state starts from). Where it is made once for all examples and meets them later
    (the direction of a derivative), the program is changed to make it for each
    (``_constant_rows``). Anywhere else (a penalty, a weight in a fixed basis) its cotangent
    is a sum over examples, and what it gives is a value of the parameter alone. Which it is shows
    only at the end: each is taken for a use first, and the analysis repeated without those that are
    none.

    So it is with a scale or bias that meets data without the example axis (a batch statistic, in
    ``(x - mean) * (rsqrt(var) * scale)``): such data is a constant of every row that it meets
    later, and the parameter is used there.

    And so with a lookup of matrices: each is taken for a stack of experts first (``_lookups``). One
    whose indices are constants is a view of the table, unless it holds the examples' axis (the same
    positions for each example): then it picks a row of the table for each, as data would.

    State without the examples (a spectral norm's vectors) is constant altogether: ``state`` says
    which of the inputs may be it.
    """
    refused: set[Hashable] = set()
    constants: set[Hashable] = set()
    held: frozenset[int] = frozenset()
    tables: set[Hashable] = set()
    by_row: set[Hashable] = set()
    while True:
        analysis = Analysis(closed, paths, refused, constants, held, tables, by_row)
        if analysis.tables > tables:
            tables = analysis.tables
            continue
        if state and (held := _without_examples(analysis, state)):
            state = frozenset()
            continue
        state = frozenset()
        alone = [u for u in analysis.plan.all_uses() if not _is_use(analysis, u, num_outputs)]
        todo = _repeats(analysis, alone, num_outputs)
        if todo.products:
            closed = repeated(closed, todo)
            refused, constants, tables, by_row = set(), set(), set(), set()
            continue
        if (found := _lookups_by_row(analysis, num_outputs)) - by_row:
            by_row |= found
            continue
        wrong = {u.where for u in alone}
        lost = set()
        for use in _lost_uses(analysis, num_outputs=num_outputs):
            of_rows = use.eqn.primitive.name in _OF_ROWS and use.kind.covered
            if of_rows and not use.from_constant:
                lost.add(use.where)
            elif use.kind.product and use.scope:  # a constant in the first iteration of a loop
                wrong.add(use.where)
        if wrong <= refused and lost <= constants:
            return closed, analysis
        refused |= wrong
        constants |= lost


def _without_examples(analysis: Analysis, inputs: frozenset[int]) -> frozenset[int]:
    """Which of some inputs lack the leading axis of the first output, or that of other inputs."""
    table, first = analysis.table, analysis.outputs[0]
    others = [axes for k, axes in analysis.axes_of_input.items() if k not in inputs]
    leading = [first.axes] if isinstance(first, Data) and first.axes else others
    examples = {a for axes in leading for axis in axes[:1] for a in table.atoms(axis)}
    if not examples:  # a single example, of which no axis of another length is
        states = {i: analysis.axes_of_input[i] for i in inputs} if leading else {}
        return frozenset(i for i, axes in states.items() if axes and table.atoms(axes[0]))

    def has_examples(axes: Axes) -> bool:
        return any(examples.intersection(table.atoms(axis)) for axis in axes)

    return frozenset(i for i in inputs if not has_examples(analysis.axes_of_input[i]))


def _is_use(analysis: Analysis, use: Use, num_outputs: int) -> bool:
    """Whether the rows are known to be data's, or hold the whole leading axis of an output."""
    if not use.from_constant:
        return True
    table = analysis.table
    rows = {a for axis in use.rows for a in table.atoms(axis)}
    return any(rows.issuperset(table.atoms(axis)) for axis in _leading_axes(analysis, num_outputs))


def _lookups_by_row(analysis: Analysis, num_outputs: int) -> set[Hashable]:
    """Lookups by constants of which each example has its own entries.

    What they give is added to data, or multiplied with it, and the examples lie along it. Where no
    output says which axis these are, they are the leading axes of data that are no others; where
    one says it, and is not followed to an input, nothing is known.
    """
    table, data = analysis.table, analysis.data_axes
    leading = {a for axes in data for axis in axes[:1] for a in table.atoms(axis)}
    others = {a for axes in data for axis in axes[1:] for a in table.atoms(axis)}
    examples = _examples(analysis, num_outputs) or (set() if num_outputs else leading - others)
    return {
        use.view.looked_up
        for use in _lost_uses(analysis, num_outputs=num_outputs)
        if use.view.looked_up is not None
        and any(a in examples for axis in use.rows for a in table.atoms(axis))
    }


def _repeats(analysis: Analysis, alone: list[Use], num_outputs: int) -> Repeats:
    """What is to be made for each example, of products that are made once for all."""
    table, axes = analysis.table, _leading_axes(analysis, num_outputs)
    examples = list(dict.fromkeys(atoms for axis in axes if (atoms := table.atoms(axis))))
    closed_in = frozenset(analysis.closed_in)
    return repeats(table, alone, analysis.meetings, closed_in, examples)


def _leading_axes(analysis: Analysis, num_outputs: int) -> list[Atoms]:
    outputs = analysis.outputs[: max(1, num_outputs)]
    return [v.axes[0] for v in outputs if isinstance(v, Data) and v.axes]


def split_lost(analysis: Analysis, *, num_outputs: int) -> tuple[list[Use], list[CoverageNote]]:
    """The uses that keep their examples, and a finding for each that does not.

    A weight multiplied by a mean over the batch receives a cotangent that is already summed
    over examples; its square is nobody's statistic.

    Args:
        analysis: The analysis of the function.
        num_outputs: Of how many outputs the first axis is known to be the examples. If of
            none, or if those axes cannot be followed back to an input, any axis that comes
            from data may be.
    """
    uses = analysis.plan.all_uses()
    lost = set(_lost_uses(analysis, num_outputs=num_outputs))
    findings = [
        CoverageNote(use.view.path, _reason(use), fatal=True)
        for use in uses
        if use in lost and not use.view.computed_from
    ]
    return [use for use in uses if use not in lost], findings


def _reason(use: Use) -> str:
    if isinstance(use.where, tuple) and use.where[0] == MODIFIED:
        return MODIFIED
    return f"{EXAMPLES_LOST} at `{use.eqn.primitive.name}`"


def _lost_uses(analysis: Analysis, *, num_outputs: int) -> list[Use]:
    table, examples = analysis.table, _examples(analysis, num_outputs)
    if not examples:  # any axis of data may be it
        examples = {a for axes in analysis.data_axes for axis in axes for a in table.atoms(axis)}
    single = any(axes and not table.atoms(axes[0]) for axes in analysis.data_axes)
    if single:  # a single example: nothing can be lost
        return []
    lost = []
    for use in analysis.plan.all_uses():
        scanned = {a for scan in use.scope for a in table.atoms(analysis.scanned[scan])}
        if not (use.data is None or scanned & examples or _runs_along(table, use, examples)):
            lost.append(use)
    return lost


def _examples(analysis: Analysis, num_outputs: int) -> set[int]:
    """The atoms of the first axis of the outputs; none where they are not followed to an input."""
    table = analysis.table
    inputs = {a for axes in analysis.data_axes for axis in axes for a in table.atoms(axis)}
    outputs = [v for v in analysis.outputs[:num_outputs] if isinstance(v, Data)]
    examples = {a for v in outputs for axis in v.axes[:1] for a in table.atoms(axis)}
    return examples if examples & inputs else set()


def split_partial(analysis: Analysis, uses: list[Use]) -> tuple[list[Use], list[CoverageNote]]:
    """The uses without those of a parameter that is also a layer, and times a constant.

    The rows of that constant (the zeros from which a recurrent state starts) would be missing in
    the layer's factors.
    """
    layers = {u.view.path for u in uses if not (u.kind.elementwise or u.view.computed_from)}
    partial = layers & analysis.of_constants.keys()
    kept = [u for u in uses if u.kind.covered or u.view.path not in partial]
    return kept, [
        CoverageNote(
            use.view.path,
            f"goes through {analysis.of_constants[use.view.path]} and meets data in "
            f"`{use.eqn.primitive.name}`",
            fatal=True,
        )
        for use in uses
        if not use.kind.covered and use.view.path in partial
    ]


def split_parts(table: AxisTable, uses: list[Use]) -> tuple[list[Use], list[CoverageNote]]:
    """The uses whose parameter is a whole number of entries of each axis it is a part of."""
    kept, findings = [], []
    for use in uses:
        if pieces_of(table, use.view.joins) is not None:
            kept.append(use)
        else:
            where = f"where it meets data in `{use.eqn.primitive.name}`"
            reason = f"is joined with others and cut across them, {where}"
            findings.append(CoverageNote(use.view.path, reason, fatal=True))
    return kept, findings


def _runs_along(table: AxisTable, use: Use, examples: set[int]) -> bool:
    mine = own_axes(table, use)
    atoms = [a for d, axis in enumerate(use.rows) if d not in mine for a in table.atoms(axis)]
    return any(a in examples or "derived" in table.kinds(a) for a in atoms)
