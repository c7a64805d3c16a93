"""Which layers a backward pass gathers: all within a budget of bytes, or a group in turn."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Place, Turn, places_of
from jaxkfac.factors._marks import weighed
from jaxkfac.factors._statistics import PassPart, Statistics
from jaxkfac.interception import Layer, scanned_by
from jaxkfac.interception.values import Window
from jaxkfac.kinds import ElementGradients, ElementSquares, InputRows, Moment, SideSums
from jaxkfac.linalg import has_panels, panel_shapes
from jaxkfac.memory import MemoryBudgetError, bytes_text

# The cost of a pass without parameter gradients, in gradients: with remat a gradient takes four
# products for each layer, and the parameter's own is left out.
FURTHER = 0.75


class Pass(NamedTuple):
    """One backward pass.

    Attributes:
        parts: What it gathers of which layers.
        start: First iteration of its window, if it has one.
        nbytes: Most bytes that its factors take on the device, slots included.
        results: How many of these bytes are the factors that it returns.
    """

    parts: Mapping[str, PassPart]
    start: int
    nbytes: int
    results: int = 0

    def has_window_of(self, name: str) -> bool:
        """Whether it gathers some of the iterations of a layer."""
        return name in self.parts and self.parts[name].rows is not None


@dataclasses.dataclass(frozen=True)
class PassPlan:
    """The passes of one collection; the first also computes the gradient."""

    passes: tuple[Pass, ...]
    nbytes: int
    max_factor_bytes: int

    @property
    def gradients(self) -> float:
        """Cost of all backward passes in gradients, without the Gram products."""
        return 1 + FURTHER * (len(self.passes) - 1)

    def __str__(self) -> str:
        """One line."""
        count = len(self.passes)
        return (
            f"{bytes_text(self.nbytes)} of factors under a budget of "
            f"{bytes_text(self.max_factor_bytes)}: {count} pass{'es' if count > 1 else ''}, "
            f"about {self.gradients:.3g} gradients"
        )


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side of one layer, the unit of a plan. Bytes are those of one scan iteration, if scanned.

    Attributes:
        layer: The layer.
        inputs: Whether it is the input side.
        extra: Bytes of what the backward pass emits, beside the factor that is formed from it.
        output: Bytes of the factor.
        written: Bytes of one row of a scan while it is written; 0 without a scan.
        scan: The scan over its rows, if there is one.
    """

    layer: Layer
    inputs: bool
    extra: int
    output: int
    written: int = 0
    scan: Any = None

    def nbytes(self, rows: int = 1) -> int:
        """Slots and factors; in a scan, also what writing one row takes."""
        return rows * (self.extra + self.output) + self.written

    def pass_part(self, rows: int) -> PassPart:
        return PassPart(
            inputs=self.inputs, outputs=not self.inputs, rows=rows if self.scan else None
        )


def plan_passes(statistics: Statistics, max_factor_bytes: int, *, vjps: int = 0) -> PassPlan:
    """Distribute the sides of all layers over passes.

    Sides outside of scans are put into passes first come, first served. The first pass takes
    as many iterations of the first scan as it has room for. The remaining iterations follow in
    windows of one size, so that one compiled program serves them all.

    Args:
        statistics: The statistics of the whole program.
        max_factor_bytes: The budget, in bytes.
        vjps: How many vector-Jacobian products' output sides are alive besides their sum.

    Raises:
        MemoryBudgetError: one side of one layer, at one iteration, is larger than the budget.
    """
    sides = list(_sides(statistics, vjps))
    for side in sides:
        if side.nbytes() > max_factor_bytes:
            where = " at one iteration" if side.scan else ""
            raise MemoryBudgetError(
                f"max_factor_bytes={max_factor_bytes}: the {'input' if side.inputs else 'output'} "
                f"side of {side.layer.name!r}{where} needs {side.nbytes()} bytes "
                f"({bytes_text(side.nbytes())}); allow that much, or lower max_dense to keep it "
                "as a diagonal"
            )
    unscanned = _bins([s for s in sides if not s.scan], max_factor_bytes)
    passes = [_pass(group, 0, 0) for group in unscanned]
    for scan in dict.fromkeys(s.scan for s in sides if s.scan):
        for group in _bins([s for s in sides if s.scan == scan], max_factor_bytes):
            length, done = group[0].layer.stack[0], 0
            # ``PassPart.rows`` is one number for both sides of a layer, so the first pass takes no
            # second side of a layer that it has in part.
            free = passes and passes[0].parts.keys().isdisjoint(s.layer.name for s in group)
            room = max_factor_bytes - passes[0].nbytes if free else 0
            if fit := min(_rows(group, room), length):
                first = _pass(group, fit, 0)
                passes[0] = Pass(
                    _merged(passes[0].parts, first.parts),
                    0,
                    passes[0].nbytes + first.nbytes,
                    passes[0].results + first.results,
                )
                done = fit
            if remaining := length - done:
                most = _rows(group, max_factor_bytes)
                rows = -(-remaining // -(-remaining // most))  # as even as the pass count allows
                passes += [_pass(group, rows, start) for start in range(done, length, rows)]
    total = sum(s.output * (s.layer.stack[0] if s.scan else 1) for s in sides)
    return PassPlan(tuple(passes or [Pass({}, 0, 0)]), total, max_factor_bytes)


def smallest_budget(statistics: Statistics, *, vjps: int = 0) -> int:
    """The least ``max_factor_bytes``: the largest side of a layer, at one iteration."""
    return max((side.nbytes() for side in _sides(statistics, vjps)), default=0)


def largest_budget(statistics: Statistics, *, vjps: int = 0) -> int:
    """The least ``max_factor_bytes`` under which one pass gathers everything."""
    sides = _sides(statistics, vjps)
    return sum(side.nbytes(side.layer.stack[0] if side.scan else 1) for side in sides)


def _sides(statistics: Statistics, vjps: int) -> Iterator[_Side]:
    traced = statistics.traced
    scans = {
        x.name: None if x.is_elementwise else scanned_by(traced.uses_of(x))
        for x in traced.table.tapped
    }
    one = dataclasses.replace(
        statistics, parts={name: PassPart(rows=1 if scan else None) for name, scan in scans.items()}
    )
    slots, number = jax.eval_shape(one.slots), jnp.ones((), jnp.float32)
    shapes = jax.eval_shape(
        lambda sums: one.factors(sums, one.outputs(sums), number, number),
        {name: slot.sums for name, slot in slots.items()},
    )
    for layer in traced.table.tapped:
        scan, slot = scans[layer.name], slots[layer.name]
        inputs, outputs = None, slot.sums
        if isinstance(slot.sums, SideSums):
            inputs, outputs = slot.sums.inputs, slot.sums.outputs
        if inputs is not None:
            sums = shapes.side(Place("a", layer.name)).data
            written = _written(inputs, getattr(inputs, "a", None)) if scan else 0
            yield _Side(layer, True, _extra(inputs, sums), _bytes(sums), written, scan)
        sums = shapes.side(places_of(layer)[-1]).data
        g = (outputs, slot.constants)
        extra = _extra(g, sums) + vjps * _bytes(g)
        if statistics.unpacks(layer) and isinstance(outputs, Moment):
            panels = panel_shapes(layer.out_features)
            extra += sum(rows * columns for rows, columns in panels) * outputs.data.dtype.itemsize
        written = _written(g, outputs) if scan else 0
        yield _Side(layer, False, extra, _bytes(sums), written, scan)


def _written(sums: ArrayTree, moment: Any) -> int:
    """Bytes of a row that is written: the row itself, and the row that it replaces.

    A folded row is made of its full matrix, which is larger than the row that it replaces.
    """
    total = 2 * _bytes(sums)
    if isinstance(moment, Moment) and moment.form == "folded":
        total += max(moment.data.dtype.itemsize * moment.size**2 - _bytes(moment), 0)
    return total


def _extra(slot: ArrayTree, sums: jax.ShapeDtypeStruct) -> int:
    """Bytes of a slot beside the factor formed from it; an entry of that shape is the factor."""
    becomes = any(leaf.shape == sums.shape for leaf in jax.tree.leaves(slot))
    return _bytes(slot) - becomes * _bytes(sums)


def _bytes(tree: ArrayTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bins(sides: list[_Side], capacity: int) -> list[list[_Side]]:
    """First fit, in program order."""
    bins: list[list[_Side]] = []
    for side in sides:
        fits = (b for b in bins if sum(s.nbytes() for s in [*b, side]) <= capacity)
        if (fitting := next(fits, None)) is None:
            bins.append([side])
        else:
            fitting.append(side)
    return bins


def _rows(group: list[_Side], room: int) -> int:
    """How many iterations of a group fit into ``room`` bytes."""
    # The bytes are linear in the rows with a constant part, so two points give both.
    one, two = (sum(s.nbytes(rows) for s in group) for rows in (1, 2))
    return max(0, 1 + (room - one) // max(two - one, 1)) if room >= one else 0


def _pass(group: list[_Side], rows: int, start: int) -> Pass:
    merged: dict[str, PassPart] = {}
    for side in group:
        merged = _merged(merged, {side.layer.name: side.pass_part(rows)})
    results = sum(s.output * (rows or 1) for s in group)
    return Pass(merged, start, sum(s.nbytes(rows or 1) for s in group), results)


def _merged(one: Mapping[str, PassPart], more: Mapping[str, PassPart]) -> dict[str, PassPart]:
    out = dict(one)
    for name, added in more.items():
        before = out.get(name, PassPart(inputs=False, outputs=False))
        out[name] = PassPart(
            before.inputs or added.inputs, before.outputs or added.outputs, added.rows
        )
    return out


# ---------------- a group of the layers in turn


class PartOfTurn(NamedTuple):
    """What the pass of one step gathers, where factors come in turns.

    Attributes:
        parts: What it gathers of which layers.
        windows: The iterations of the layers that are scanned.
    """

    parts: dict[str, PassPart]
    windows: dict[str, Window]


def part_of_turn(statistics: Statistics, turn: Turn, *, static: bool) -> PartOfTurn:
    """The layers of a turn, and some iterations of those that are scanned.

    Every group has iterations of every scanned layer, so that one program with a traced start
    serves all groups. The other layers are divided into groups of about equal bytes if the number
    of the group is static; if it is traced, every group has all of them.

    Args:
        statistics: The statistics of the whole program.
        turn: The group.
        static: Whether its number is static.

    Raises:
        ValueError: there are fewer layers than groups, or no layer is scanned and the number of the
            group is traced.
    """
    iterations = iterations_in_turns(statistics)
    others = tuple(x for x in statistics.layers if x.name not in iterations)
    index_dtype = jax.dtypes.canonicalize_dtype(int)  # that of a scan's own iterations
    as_index = lambda start: int(start) if static else jnp.asarray(start, index_dtype)
    windows = {
        name: Window(as_index(turn.start_of(length)), turn.rows_of(length))
        for name, length in iterations.items()
    }
    if static:
        groups = _groups(statistics, others, turn.of, alone=not iterations)
        others = groups[turn.number] if turn.number < len(groups) else ()
    elif not iterations:
        raise ValueError(
            f"collect={turn.of} divides the layers of a program without a scan into groups, each "
            "with a compiled program of its own, and step= is traced here: make the number of the "
            "group static, as in jax.jit(train_step, static_argnames='group'), which calls "
            f"stats(..., step=group), and train_step(..., group=i % {turn.of})"
        )
    parts = {name: PassPart(rows=window.size) for name, window in windows.items()}
    return PartOfTurn({**parts, **{layer.name: PassPart() for layer in others}}, windows)


def iterations_in_turns(statistics: Statistics) -> dict[str, int]:
    """``{layer: length of its scan}`` for the layers whose iterations come in turns.

    Statistics of scales and lone biases are small, and input rows with weights by use need all
    iterations.
    """
    traced, candidates = statistics.traced, {}
    weighted = {layer.name for layer in weighed(traced)}
    for layer in statistics.layers:
        scan = None if layer.is_elementwise else scanned_by(traced.uses_of(layer))
        if scan is not None and layer.name not in weighted:
            candidates[layer.name] = scan, layer.input
    of_inputs = defaultdict(set)
    for layer in statistics.layers:  # readers of one input share its A
        of_inputs[layer.input].add(candidates.get(layer.name, (None,))[0])
    return {
        layer.name: layer.stack[0]
        for layer in statistics.layers
        if layer.name in candidates and len(of_inputs[layer.input]) == 1
    }


def largest_turn(statistics: Statistics, number: int) -> int | None:
    """The group with the most bytes, if each has a program of its own; otherwise ``None``.

    Raises:
        ValueError: there is no scan, and there are fewer layers than groups.
    """
    if iterations_in_turns(statistics):
        return None
    groups = _groups(statistics, statistics.layers, number, alone=True)
    sizes = [_nbytes_of(statistics)(list(group)) for group in groups]
    return sizes.index(max(sizes))


def _groups(
    statistics: Statistics, layers: tuple[Layer, ...], number: int, *, alone: bool
) -> list[tuple[Layer, ...]]:
    """The groups of the layers that are not scanned; if these are ``alone``, none is empty."""
    groups = balanced_groups(layers, number, _nbytes_of(statistics))
    if alone and len(groups) < number:
        raise ValueError(
            f"collect={number}: the program has {len(groups)} layers with inputs of their own, "
            "and each group needs one: choose a smaller number of groups"
        )
    return groups


def _nbytes_of(statistics: Statistics) -> Callable[[list[Layer]], float]:
    """A function that returns the bytes of the factors of some layers."""
    shapes = statistics.shapes(jax.ShapeDtypeStruct((), jnp.float32))
    sizes: dict[str, int] = defaultdict(int)
    for place, side in shapes.sides.items():
        sizes[place.key] += _bytes(side.data)

    def nbytes(group: list[Layer]) -> float:
        return float(sum(sizes[layer.name] for layer in group))

    return nbytes


def balanced_groups(
    layers: tuple[Layer, ...], number: int, work: Callable[[list[Layer]], float]
) -> list[tuple[Layer, ...]]:
    """At most ``number`` groups of about equal work.

    The readers of one input stay together, and so do all readings of a parameter, because the
    reading that owns the parameter is chosen among all of them.

    Args:
        layers: The layers.
        number: The number of groups; there are fewer if there are fewer layers.
        work: The work of some layers that stay together.
    """
    joined: dict[Hashable, Hashable] = {}

    def root(of: Hashable) -> Hashable:
        while joined.setdefault(of, of) != of:
            of = joined[of]
        return of

    for layer in layers:
        joined[root(layer.input)] = root((layer.weight.path, layer.weight.index))
    readers: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers:
        readers[root(layer.input)].append(layer)
    groups: list[list[Layer]] = [[] for _ in range(min(number, len(readers)))]
    loads = [0.0] * len(groups)
    for group in sorted(readers.values(), key=work, reverse=True):
        least = loads.index(min(loads))
        groups[least] += group
        loads[least] += max(work(group), 1.0)  # or all layers without work would be in one group
    return [tuple(group) for group in groups if group]


# ---------------- bytes that devices exchange


def exchanged_bytes(statistics: Statistics, platform: str) -> int:
    """Bytes that devices sum in one backward pass, each device holding some of the examples.

    A product over rows is summed where it is formed, as a full matrix or as the panels of one
    triangle. Numbers of rows are not counted here; they are exchanged for each layer if there is
    a mask.

    Args:
        statistics: The statistics of the layers.
        platform: The platform whose products of rows are counted.
    """
    return sum(_of_layer(statistics, layer, platform) for layer in statistics.layers)


def _of_layer(statistics: Statistics, layer: Layer, platform: str) -> int:
    # Numbers of rows are known from shapes if there is no mask.
    match jax.eval_shape(lambda: statistics.slot(layer)).sums:
        case ElementSquares(squares=squares):
            return _bytes(squares)
        case ElementGradients(gradient=gradient):
            return _bytes(gradient) // gradient.shape[-1]
        case SideSums(inputs=inputs, outputs=outputs):
            of_side = functools.partial(_of_side, layer, platform)
            total = of_side(outputs, unpacks=statistics.unpacks(layer))
            if isinstance(inputs, InputRows):
                return total + of_side(inputs.rows)
            return total + (of_side(inputs.a) + _bytes(inputs.sum) if inputs else 0)
    raise AssertionError(f"{layer.name!r} gathers another record")


def _of_side(layer: Layer, platform: str, side: Any, *, unpacks: bool = False) -> int:
    if isinstance(side, Moment) and side.form != "panels" and not unpacks:
        return _bytes(side)
    if side is None:
        return 0
    first = jax.tree.leaves(side)[0]  # of rows, products are formed after the pass
    return first.dtype.itemsize * _elements(layer, first.shape[-1], platform)


def _elements(layer: Layer, size: int, platform: str) -> int:
    """Elements of a stack of matrices, or of a single matrix: of its triangle's panels if wide."""
    if layer.stack or not has_panels(size, platform):
        return math.prod(layer.stack) * size**2
    return sum(rows * columns for rows, columns in panel_shapes(size))
