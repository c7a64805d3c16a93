"""Which rows of a use are the examples, and uses whose statistics would be wrong."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

from jaxkfac._interpreter import InputsOf, live_inputs, operands_of_call
from jaxkfac._jaxpr_compat import ClosedJaxpr, Eqn, call_kind, is_call, is_var, recomputes
from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._constant_rows import Repeats, repeated, repeats
from jaxkfac.interception._kind import Data, Use
from jaxkfac.interception._layer import EXAMPLES_LOST
from jaxkfac.interception._plan import Plan
from jaxkfac.interception._row_masks import own_axes
from jaxkfac.interception._structured import MODIFIED
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable
from jaxkfac.interception.values._index import pieces_of
from jaxkfac.interception.values._values import CoverageNote

# ---------------- the layer uses that lead to given outputs


def leading_to(
    plan: Plan, *outputs: int, past: Collection[int] = ()
) -> tuple[list[Use], frozenset[int]]:
    """The uses on which some outputs depend, and the positions of the inputs.

    ``past`` are positions of inputs that custom derivatives read: a path to an output through such
    an equation does not count.
    """
    uses: dict[int, Use] = {}
    inputs = _inputs(plan, outputs, uses, past)
    return list(uses.values()), frozenset(inputs)


def _inputs(
    plan: Plan, outputs: Iterable[int], uses: dict[int, Use], past: Collection[int] = ()
) -> set[int]:
    """Positions of the inputs on which some outputs depend; ``uses`` gets the uses on the way."""
    walls = {plan.jaxpr.invars[k] for k in past}

    def operands_read(position: int, eqn: Eqn, results: set[int]) -> Iterable[int]:
        # Behind a stopped gradient no cotangent arrives, so no use there has statistics.
        if eqn.primitive.name == "stop_gradient":
            return ()
        within = [k for k, v in enumerate(eqn.invars) if is_var(v) and v in walls]
        if within and call_kind(eqn) == "custom":
            return ()
        uses.update((id(use), use) for use in plan.uses.get(position, ()))
        if position not in plan.calls:
            return range(len(eqn.invars))
        inner = plan.calls[position]
        uses.update((id(use), use) for use in inner.entries.values())
        if call_kind(eqn) == "custom":  # a rule has other operands and results than its function
            uses.update((id(use), use) for use in inner.all_uses())
            return range(len(eqn.invars))
        within = within if is_call(eqn) else []
        bodies = [inputs_of(body, within) for body in plan.bodies(position)]
        return operands_of_call(eqn, results, bodies)

    def inputs_of(body: Plan, past: Collection[int]) -> InputsOf:
        return lambda outputs: _inputs(body, outputs, uses, past)

    return live_inputs(plan.jaxpr, outputs, operands_read)


# ---------------- parameters that a derivative inside of the program reads a second time
#
# ``jax.checkpoint`` does not store the products inside it, and reverse mode computes them again. If
# that derivative is taken inside of the program (the residual of a differential equation), the
# program holds both computations. One row of input then has two readings, each with
# a part of its cotangent. Counted as two rows, A weighs it double, and G is the sum of two squares
# instead of the square of a sum: the statistics would depend on where the program saves memory.


_REASON = (
    "is read again where a derivative inside of the function recomputes what `jax.checkpoint` did "
    "not keep, which would count its rows twice: put `jax.checkpoint` around the derivative, not "
    "around what is derived"
)


def split_recomputed(
    analysis: Analysis, uses: Sequence[Use], *, num_outputs: int
) -> tuple[list[Use], list[CoverageNote]]:
    """The uses without those of parameters that one derivative reads a second time.

    A first reading that leads to no output does not count: a checkpoint around everything that is
    differentiated leaves one reading, the second.
    """
    again = {id(use) for use in _recomputed(analysis.plan)}
    lost: dict[str, None] = {}
    for output in range(num_outputs or len(analysis.outputs)) if again else ():
        read, reread = {}, {}
        for use in leading_to(analysis.plan, output)[0]:
            place = (use.view.source.path, use.kind.name, use.axes.inputs)
            (reread if id(use) in again else read)[place] = use
        for use in (reread[place] for place in read.keys() & reread.keys()):
            lost |= dict.fromkeys(use.view.source.computed_from or (use.view.source.path,))
    remaining_uses = [
        u
        for u in uses
        if lost.keys().isdisjoint((u.view.source.path, *u.view.source.computed_from))
    ]
    return remaining_uses, [CoverageNote(path, _REASON, fatal=True) for path in lost]


def _recomputed(plan: Plan) -> Iterator[Use]:
    for position, inner in plan.calls.items():
        if recomputes(plan.jaxpr.eqns[position]):
            yield from inner.all_uses()
            continue
        for body in plan.bodies(position):
            yield from _recomputed(body)


# ---------------- uses whose rows are not the examples


_OF_ROWS = frozenset("mul div add sub add_any".split())


def analyse(
    closed: ClosedJaxpr,
    paths: list[str | None],
    *,
    num_outputs: int = 0,
    state: frozenset[int] = frozenset(),
) -> tuple[ClosedJaxpr, Analysis]:
    """A traced function and its analysis, in which constants and rows are told apart.

    The program alone shows only at its end what an equation is, so the analysis is repeated: each
    equation is first taken for a layer use, and the next round excludes those that are none.

    *A constant times a parameter* is a layer use if its rows are the examples (the zeros from which
    a recurrent state starts). If it is computed once for all examples and meets them later (the
    direction of a derivative), the program is changed to compute it for each example
    (``_constant_rows``). In any other place (a penalty, a weight in a fixed basis) its cotangent is
    a sum over examples, and the result counts as a value of the parameter alone.

    *A scale or bias that meets data without the example axis* (a batch statistic, in
    ``(x - mean) * (rsqrt(var) * scale)``): such data counts as a constant for every row that it
    meets later, and the parameter is used there.

    *A lookup of matrices* is first taken for a stack of experts (``_functions``). If its indices
    are constants, it is a view of the table, unless the indices have the example axis (the same
    positions for each example): then it picks a row of the table for each example, as data would.

    *State without the examples* (a spectral norm's vectors) is constant altogether; ``state`` gives
    the inputs that may be such state.
    """
    refused: set[Hashable] = set()
    constants: set[Hashable] = set()
    constant_inputs: frozenset[int] = frozenset()
    tables: set[Hashable] = set()
    by_row: set[Hashable] = set()
    while True:
        analysis = Analysis(closed, paths, refused, constants, constant_inputs, tables, by_row)
        if analysis.tables > tables:
            tables = analysis.tables
            continue
        if state and (constant_inputs := _without_examples(analysis, state)):
            state = frozenset()
            continue
        state = frozenset()
        alone = [u for u in analysis.plan.all_uses() if not _is_use(analysis, u, num_outputs)]
        todo = _repeats(analysis, alone, num_outputs)
        if todo.products:
            closed = repeated(closed, todo)
            # The repeated program has new equations, and all of these name equations.
            refused, constants, tables, by_row = set(), set(), set(), set()
            continue
        if (by_row_found := _lookups_by_row(analysis, num_outputs)) - by_row:
            by_row |= by_row_found
            continue
        wrong = {u.at.scope.where for u in alone}
        lost = set()
        for use in _lost_uses(analysis, num_outputs=num_outputs):
            of_rows = use.at.eqn.primitive.name in _OF_ROWS and use.kind.covered
            if of_rows and not (use.data is not None and use.data.constant):
                lost.add(use.at.scope.where)
            elif (
                use.kind.product and use.at.scope.scans
            ):  # a constant in the first iteration of a loop
                wrong.add(use.at.scope.where)
        if wrong <= refused and lost <= constants:
            return closed, analysis
        refused |= wrong
        constants |= lost


def _without_examples(analysis: Analysis, inputs: frozenset[int]) -> frozenset[int]:
    """The inputs among ``inputs`` without the example axis: the leading axis of the first output.

    If the first output has none, it is the leading axis of the other inputs.
    """
    table, first = analysis.table, analysis.outputs[0]
    other_axes = [axes for k, axes in analysis.axes_of_input.items() if k not in inputs]
    leading = [first.axes] if isinstance(first, Data) and first.axes else other_axes
    examples = {a for axes in leading for axis in axes[:1] for a in table.atoms(axis)}
    if not examples:  # a single example, and an axis of another length is not its axis
        states = {i: analysis.axes_of_input[i] for i in inputs} if leading else {}
        return frozenset(i for i, axes in states.items() if axes and table.atoms(axes[0]))

    def has_examples(axes: Axes) -> bool:
        return any(examples.intersection(table.atoms(axis)) for axis in axes)

    return frozenset(i for i in inputs if not has_examples(analysis.axes_of_input[i]))


def _is_use(analysis: Analysis, use: Use, num_outputs: int) -> bool:
    """Whether the rows come from data, or hold all of an output's leading axis."""
    if use.data is None or not use.data.constant:
        return True
    table = analysis.table
    rows = {a for axis in use.axes.rows for a in table.atoms(axis)}
    return any(rows.issuperset(table.atoms(axis)) for axis in _leading_axes(analysis, num_outputs))


def _lookups_by_row(analysis: Analysis, num_outputs: int) -> set[Hashable]:
    """Lookups by constants in which each example has its own entries.

    Their result is added to data or multiplied with it, along the example axis. If no output says
    which axis that is, it is any axis that leads some data and is no later axis of other data. If
    an output says it but cannot be followed to an input, nothing is known.
    """
    table, data = analysis.table, analysis.data_axes
    leading = {a for axes in data for axis in axes[:1] for a in table.atoms(axis)}
    not_leading = {a for axes in data for axis in axes[1:] for a in table.atoms(axis)}
    examples = _examples(analysis, num_outputs) or (set() if num_outputs else leading - not_leading)
    return {
        use.view.history.looked_up
        for use in _lost_uses(analysis, num_outputs=num_outputs)
        if use.view.history.looked_up is not None
        and any(a in examples for axis in use.axes.rows for a in table.atoms(axis))
    }


def _repeats(analysis: Analysis, alone: list[Use], num_outputs: int) -> Repeats:
    """The repeats for each example of products that the program computes once for all."""
    table, axes = analysis.table, _leading_axes(analysis, num_outputs)
    examples = list(dict.fromkeys(atoms for axis in axes if (atoms := table.atoms(axis))))
    closed_in = frozenset(analysis.closed_in)
    return repeats(table, alone, analysis.meetings, closed_in, examples)


def _leading_axes(analysis: Analysis, num_outputs: int) -> list[Atoms]:
    outputs = analysis.outputs[: max(1, num_outputs)]
    return [v.axes[0] for v in outputs if isinstance(v, Data) and v.axes]


def split_lost(analysis: Analysis, *, num_outputs: int) -> tuple[list[Use], list[CoverageNote]]:
    """The uses that keep their examples, and a finding for each use that does not.

    A weight that is multiplied by a mean over the batch receives a cotangent that is already a sum
    over examples, and the square of that is no statistic.

    Args:
        analysis: The analysis of the function.
        num_outputs: The number of outputs whose first axis is known to be the examples. If it is 0,
            or if these axes cannot be followed back to an input, any axis of data may be the
            examples.
    """
    uses = analysis.plan.all_uses()
    lost = set(_lost_uses(analysis, num_outputs=num_outputs))
    findings = [
        CoverageNote(use.view.source.path, _reason(use), fatal=True)
        for use in uses
        if use in lost and not use.view.source.computed_from
    ]
    return [use for use in uses if use not in lost], findings


def _reason(use: Use) -> str:
    if isinstance(use.at.scope.where, tuple) and use.at.scope.where[0] == MODIFIED:
        return MODIFIED
    return f"{EXAMPLES_LOST} at `{use.at.eqn.primitive.name}`"


def _lost_uses(analysis: Analysis, *, num_outputs: int) -> list[Use]:
    table, examples = analysis.table, _examples(analysis, num_outputs)
    if not examples:
        # A leading axis of size one may be that of a single example, of which nothing can be lost.
        # Beside known examples it says nothing: it may be that of a mask `(1, S)` for all of them.
        if any(axes and not table.atoms(axes[0]) for axes in analysis.data_axes):
            return []
        # Any axis of data may be the examples.
        examples = {a for axes in analysis.data_axes for axis in axes for a in table.atoms(axis)}
    lost = []
    for use in analysis.plan.all_uses():
        scanned = {a for scan in use.at.scope.scans for a in table.atoms(analysis.scanned[scan])}
        if not (use.data is None or scanned & examples or _runs_along(table, use, examples)):
            lost.append(use)
    return lost


def _examples(analysis: Analysis, num_outputs: int) -> set[int]:
    """The atoms of the outputs' first axes; empty if they cannot be followed to an input."""
    table = analysis.table
    inputs = {a for axes in analysis.data_axes for axis in axes for a in table.atoms(axis)}
    outputs = [v for v in analysis.outputs[:num_outputs] if isinstance(v, Data)]
    examples = {a for v in outputs for axis in v.axes[:1] for a in table.atoms(axis)}
    return examples if examples & inputs else set()


def split_partial(analysis: Analysis, uses: list[Use]) -> tuple[list[Use], list[CoverageNote]]:
    """Drop second-pass uses in which a parameter that is also in a layer meets a constant.

    The rows of that constant (the zeros from which a recurrent state starts) would be missing in
    the layer's factors.
    """
    layers = {
        u.view.source.path for u in uses if not (u.kind.elementwise or u.view.source.computed_from)
    }
    partial = layers & analysis.of_constants.keys()
    remaining_uses = [u for u in uses if u.kind.covered or u.view.source.path not in partial]
    return remaining_uses, [
        CoverageNote(
            use.view.source.path,
            f"goes through {analysis.of_constants[use.view.source.path]} and meets data in "
            f"`{use.at.eqn.primitive.name}`",
            fatal=True,
        )
        for use in uses
        if not use.kind.covered and use.view.source.path in partial
    ]


def split_parts(table: AxisTable, uses: list[Use]) -> tuple[list[Use], list[CoverageNote]]:
    """The uses whose parameter covers full entries of each axis along which it was joined."""
    aligned_uses, findings = [], []
    for use in uses:
        if pieces_of(table, use.view.joins) is not None:
            aligned_uses.append(use)
        else:
            where = f"where it meets data in `{use.at.eqn.primitive.name}`"
            reason = f"is joined with others and cut across them, {where}"
            findings.append(CoverageNote(use.view.source.path, reason, fatal=True))
    return aligned_uses, findings


def _runs_along(table: AxisTable, use: Use, examples: set[int]) -> bool:
    mine = own_axes(table, use)
    atoms = [a for d, axis in enumerate(use.axes.rows) if d not in mine for a in table.atoms(axis)]
    # An axis that was lost on the way may be the examples. The use stays; a mask, which would have
    # to know, is then an error.
    return any(a in examples or "derived" in table.kinds(a) for a in atoms)
