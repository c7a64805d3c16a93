"""Trace a function once, find its layers, and re-emit it with handlers."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._arguments import check_arrays, check_function, leaves_by_path
from jaxkfac.interception._axes import Atoms, Axes
from jaxkfac.interception._compat import varying_axes
from jaxkfac.interception._elements import Elements
from jaxkfac.interception._encoded import (
    DeferredParameter,
    decoded_shapes,
    encoded_paths,
    is_encoded,
    refuse_deferred,
)
from jaxkfac.interception._examples import (
    analyse,
    leading_to,
    split_lost,
    split_partial,
    split_parts,
    split_recomputed,
)
from jaxkfac.interception._grouping import group_uses
from jaxkfac.interception._index import shape_of
from jaxkfac.interception._kind import Data, Use
from jaxkfac.interception._layer import Layer, LayerTable, ParameterMatrix
from jaxkfac.interception._mark_outputs import OutputMark, lifted, marks_of
from jaxkfac.interception._rewrite import Around, Handler, Rewriter
from jaxkfac.interception._row_masks import RowMask
from jaxkfac.interception._slots import Entries, Slot, Window, check_entries
from jaxkfac.interception._trace_cache import depth_explained
from jaxkfac.interception._values import CoverageNote
from jaxkfac.interception.coupling import (
    Answer,
    Answers,
    Question,
    answers,
    label_inputs,
    leading_labels,
)

_PARTLY = "is in a layer for some of its readings: its factors leave out those that are not covered"


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function, traced and analyzed for one set of shapes.

    Attributes:
        closed: The jaxpr of ``fn(params, *args)``.
        analysis: Its analysis.
        table: The layers, grouped and selected.
        out_tree: Structure of the function's result.
        out_shapes: ``jax.ShapeDtypeStruct`` of each output leaf.
        shapes: Shape of each parameter.
        encoded: Paths of the parameters that are stored in another form than an array.
        num_outputs: Number of leaves at the start of the result that are outputs of the model.
        marks: If a loss names its outputs, the marks that these outputs stand for.
        state: Positions of the inputs that a call changes.
        isolated: Whether the outputs' cotangents are those of one example at a time, so that all
            rows are that example's.
    """

    closed: Any
    analysis: Analysis
    table: LayerTable
    out_tree: Any
    out_shapes: list[Any]
    shapes: dict[str, tuple[int, ...]]
    encoded: frozenset[str] = frozenset()
    num_outputs: int = 1
    marks: tuple[OutputMark, ...] = ()
    state: frozenset[int] = frozenset()
    isolated: bool = False

    def output_axes(self, index: int = 0) -> Axes | None:
        """Axis atoms of an output leaf, or ``None`` if it does not depend on data."""
        value = self.analysis.outputs[index]
        return value.axes if isinstance(value, Data) else None

    def part_shape(self, matrix: ParameterMatrix) -> tuple[int, ...]:
        """Shape of the elements of a parameter that a matrix covers."""
        return shape_of(matrix.index, self.shapes[matrix.path])

    @property
    def num_examples(self) -> int:
        """Length of the first output's leading axis."""
        shape = self.out_shapes[0].shape
        return shape[0] if shape and not self.isolated else 1

    @property
    def examples(self) -> Atoms:
        """Atoms of the first output's leading axis, the examples; empty for a single example."""
        axes = () if self.isolated else self.output_axes()
        return self.analysis.table.atoms(axes[0]) if axes else ()

    def examples_meet(
        self, question: Question, *, output: int | None = None, alone: bool = False
    ) -> Answer:
        """Whether an example's output depends on another example.

        Every caller that relies on independent examples asks this method.

        Args:
            question: ``"value"``, if examples are run alone; ``"derivative"``, if one backward
                pass serves all of them.
            output: One of the outputs, with its own examples; ``None`` for all of them.
            alone: Whether entry ``i`` of every input has to be example ``i``.
        """
        if alone:
            return self._answers_alone.of(question)
        outputs = range(max(1, self.num_outputs)) if output is None else [output]
        all_answers = [self._answers[k].of(question) for k in outputs]
        return next(
            (x for x in all_answers if x.answer == "yes"), max(all_answers, key=_is_unknown)
        )

    def meeting(self) -> str:
        """Where examples meet, for the layer table, assuming that the outputs lead with them.

        The answer is empty for an output without further axes, and for one whose leading axis is
        not as long as that of any input: such an output says nothing.
        """
        shape = self.out_shapes[0].shape if self.out_shapes else ()
        inputs = [self._in_shapes[k] for k in self.analysis.axes_of_input]
        if len(shape) < 2 or shape[0] == 1 or all(x[:1] != shape[:1] for x in inputs):
            return ""
        value, derivative = (self.examples_meet(q, output=0) for q in ("value", "derivative"))
        if value == derivative:
            return "" if value.answer == "no" else str(value)
        return f"in values, {value}; in derivatives, {derivative}"

    @functools.cached_property
    def _answers(self) -> list[Answers]:
        """Both answers for each output."""
        table = self.analysis.table
        outputs_by_axis: dict[tuple[tuple[int, ...], Atoms], list[int]] = {}
        for k in range(max(1, self.num_outputs)):
            shape, axes = self.out_shapes[k].shape, self.output_axes(k)
            atoms = table.atoms(axes[0]) if axes else ()
            outputs_by_axis.setdefault((shape[:1], atoms), []).append(k)
        results = [Answers()] * len(self.out_shapes)
        for (shape, atoms), outputs in outputs_by_axis.items():
            if shape in ((), (1,)):  # a single example
                continue
            (number,) = shape
            labels = label_inputs(
                table, self.analysis.axes_of_input, self._in_shapes, atoms, number,
                state=self.state,
            )  # fmt: skip
            answers_of_outputs = answers(
                self.analysis.plan, number, len(self.shapes), labels, outputs
            )
            for k, both in zip(outputs, answers_of_outputs, strict=True):
                results[k] = both
        return results

    @functools.cached_property
    def _answers_alone(self) -> Answers:
        """Both answers for all outputs together, if entry ``i`` of every input is example ``i``."""
        number, outputs = self.num_examples, range(max(1, self.num_outputs))
        if number == 1:
            return Answers()
        labels = leading_labels(
            self.analysis.axes_of_input, self._in_shapes, number, state=self.state
        )
        if labels is None:
            lost = Answer("unknown", "because an input has another leading axis than the outputs")
            return Answers(lost, lost)
        all_answers = answers(self.analysis.plan, number, len(self.shapes), labels, outputs)
        return Answers(
            *[
                next(
                    (x for x in of_question if x.answer == "yes"), max(of_question, key=_is_unknown)
                )
                for of_question in (
                    [x.value for x in all_answers],
                    [x.derivative for x in all_answers],
                )
            ]
        )

    @functools.cached_property
    def _in_shapes(self) -> list[tuple[int, ...]]:
        return [getattr(v.aval, "shape", ()) for v in self.closed.jaxpr.invars]

    def join_examples(self) -> None:
        """Merge the leading axes of all outputs: they are the examples."""
        first, *other_axes = [self.output_axes(k) for k in range(self.num_outputs)]
        for axes in other_axes:
            if first and axes:
                self.analysis.table.unify(first[0], axes[0])

    @property
    def example_axes(self) -> list[tuple[Atoms, int]]:
        """The distinct leading axes of the outputs, with their lengths.

        There are several if marks name outputs of different examples.
        """
        if self.isolated:
            return [((), 1)]
        lengths: dict[Atoms, int] = {}
        for index, shape in enumerate(self.out_shapes[: self.num_outputs]):
            axes = self.output_axes(index)
            atoms = self.analysis.table.atoms(axes[0]) if axes else ()
            lengths.setdefault(atoms, shape.shape[0] if shape.shape else 1)
        return list(lengths.items())

    @functools.cached_property
    def marks_reached(self) -> dict[int, frozenset[int]]:
        """For each use, by ``id``, the marks whose outputs depend on it."""
        marks_of_use = collections.defaultdict(set)
        for mark in range(len(self.marks)):
            for use in leading_to(self.analysis.plan, mark)[0]:
                marks_of_use[id(use)].add(mark)
        return {use: frozenset(marks) for use, marks in marks_of_use.items()}

    def uses_of(self, layer: Layer) -> list[Use]:
        """The uses of a layer, in program order."""
        return self._uses[layer.name]

    @functools.cached_property
    def _uses(self) -> dict[str, list[Use]]:
        uses_by_layer = collections.defaultdict(list)
        for use in self.analysis.plan.all_uses():
            for name in dict.fromkeys(use.layers):
                if name is not None:
                    uses_by_layer[name].append(use)
        return uses_by_layer

    def emit(
        self,
        handler: Handler,
        params: PyTree,
        slots: Mapping[str, Slot],
        *args: Any,
        entries: Entries | None = None,
        masks: list[RowMask] | None = None,
        windows: Mapping[str, Window] | None = None,
    ) -> Any:
        """Run the function with ``handler`` in place of its layer uses.

        Args:
            handler: See ``_rewrite.Handler``.
            params: Parameters, with the structure and shapes of the trace.
            slots: ``{layer name: slot}``; layers without a slot stay unchanged.
            *args: The remaining arguments.
            entries: Declarations of the entries of slots; see ``_slots``.
            masks: Which rows exist, for the layers whose rows run along their axes.
            windows: For some layers of a scan, the iterations for which their slots have rows.

        Raises:
            ValueError: a slot holds an entry that ``entries`` does not declare.
        """
        entries = entries or {}
        check_entries(slots, entries)
        by_path = collections.defaultdict(dict)
        computed = {name: slot for name, slot in slots.items() if self.table[name].computed_from}
        traced_indices = collections.defaultdict(set)
        for use in self.analysis.plan.all_uses():
            for name in slots.keys() & use.layers:
                slot, weight = slots[name], self.table[name].weight
                if self.table[name].is_elementwise:
                    slot = Elements.of(slot, weight.index, self.shapes[weight.path])
                by_path[weight.path][name] = slot
                for layer in (name, use.layer or name):
                    traced_indices[layer].update(c.traced_index for c in use.view.consumed)
        rewriter = Rewriter(
            table=self.analysis.table,
            handler=handler,
            entries=entries,
            marks=tuple(m.axes for m in self.analysis.plan.all_marks()),
            traced_indices=traced_indices,
            windows=windows or {},
            encoded=self.encoded,
        )
        paths = leaves_by_path(decoded_shapes(params))
        leaves = jax.tree.leaves(params, is_leaf=is_encoded)
        flat = [
            DeferredParameter.of(leaf, path) if is_encoded(leaf) else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        input_slots = [by_path.get(path, {}) for path in paths]
        flat += jax.tree.leaves(args)
        input_slots += [{}] * (len(flat) - len(input_slots))
        out = rewriter.run(self.analysis.plan, flat, input_slots, Around(masks or [], {}, computed))
        refuse_deferred(enumerate(out), lambda _: "the caller: the function returns it")
        return jax.tree.unflatten(self.out_tree, out)


def trace(
    fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    layers: str | None = None,
    max_dense: int = 16384,
    experts: str | None = None,
    scale_blocks: bool = False,
    num_outputs: int = 0,
    state: PyTree = None,
) -> Traced:
    """Trace ``fn(params, *args)`` and find its layers; see ``find_layers``.

    ``scale_blocks`` gives scales and lone biases a dense block. ``num_outputs`` is the number of
    leaves at the start of the result whose first axis is the examples. ``state`` is the part of
    the arguments that a call changes.
    """
    check_function("fn", fn, "fn(params, *args)")
    encoded, params = encoded_paths(params), decoded_shapes(params)
    check_arrays("params", params)
    check_arrays("the arguments beside params", args)
    with depth_explained():
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(params, *args)
    paths = leaves_by_path(params)
    num_args = len(closed.jaxpr.invars) - len(paths)
    changing = {id(leaf) for leaf in jax.tree.leaves(state)}
    states = [k for k, x in enumerate(jax.tree.leaves(args)) if id(x) in changing]
    of_state = frozenset(k + len(paths) for k in states)
    with depth_explained():
        closed, analysis = analyse(
            closed, [*paths, *[None] * num_args], num_outputs=num_outputs, state=of_state
        )
    # A use that leads to no output has no gradient: a derivative leaves its value unread.
    live = {id(use) for use in leading_to(analysis.plan, *range(len(analysis.outputs)))[0]}
    uses, lost = split_lost(analysis, num_outputs=num_outputs)
    dead = {use.view.path for use in uses if id(use) not in live}
    uses = [use for use in uses if id(use) in live]
    _refuse_encoded_parts(uses, encoded)
    uses, cut = split_parts(analysis.table, uses)
    uses, partial = split_partial(analysis, uses)
    uses, recomputed = split_recomputed(analysis, uses, num_outputs=num_outputs)
    # A diagonal for only some readings of a function of a parameter would be wrong.
    lost = [*lost, *cut, *partial, *recomputed]
    missing = {f.path for f in (*analysis.findings, *lost) if f.fatal}
    uses = [u for u in uses if not (u.view.function and u.view.path in missing)]
    _mark_features(analysis, uses, num_outputs=num_outputs)
    found_layers, notes = group_uses(
        analysis.table,
        uses,
        max_dense=max_dense,
        experts=experts,
        pattern=layers,
        scale_blocks=scale_blocks,
    )
    findings = [*analysis.findings, *lost, *notes]
    covered_paths = {
        matrix.path for layer in found_layers for matrix in (layer.weight, layer.bias) if matrix
    }
    partly = dict.fromkeys(f.path for f in findings if f.fatal and f.path in covered_paths)
    findings += [CoverageNote(path, _PARTLY, fatal=False) for path in partly]
    touched = {f.path for f in findings}
    touched |= {v.path for u in uses for v in (u.view, *u.view.members)}
    shapes_of = {path: tuple(getattr(leaf, "shape", ())) for path, leaf in paths.items()}
    unread = [
        (
            path,
            "leads to no output"
            if path in dead
            else "meets no data"
            if path in analysis.reads
            else "is not read by the function",
        )
        for path in paths
        if path not in touched
    ]

    def is_selected(path: str) -> bool:
        """Whether the caller's pattern selects a parameter."""
        return layers is None or path in covered_paths or re.fullmatch(layers, path) is not None

    table = LayerTable(
        layers=tuple(found_layers),
        uncovered=[(f.path, f.reason) for f in findings if f.fatal or f.path not in covered_paths]
        + unread,
        notes=[(f.path, f.reason) for f in findings if not f.fatal and f.path in covered_paths],
        sizes={path: math.prod(shape) for path, shape in shapes_of.items()},
        problems=[(f.path, f.reason) for f in findings if f.fatal and is_selected(f.path)],
    )
    leaves, tree = jax.tree.flatten(shapes)
    traced = Traced(
        closed,
        analysis,
        table,
        tree,
        leaves,
        shapes_of,
        encoded,
        num_outputs or 1,
        state=of_state,
    )
    table = dataclasses.replace(table, meeting=traced.meeting)
    return dataclasses.replace(traced, table=table)


def _mark_features(analysis: Analysis, uses: list[Use], *, num_outputs: int) -> None:
    """Set ``Use.features``: the axes of an elementwise use's result that are features.

    These are the axes that a product takes in or gives out, and the last axis of an output. An axis
    that is also an axis of a product's rows, or another axis of an output, counts as positions (the
    tokens of a layer that mixes tokens), as does an axis that no product knows (pixels that are
    pooled). A scalar that multiplies logits has one gradient at each position, the sum over the
    classes.
    """
    table, products = analysis.table, [use for use in uses if not use.kind.elementwise]
    outputs = [v.axes for v in analysis.outputs[: max(1, num_outputs)] if isinstance(v, Data)]

    def atoms_of(axes: Iterable[Atoms]) -> set[int]:
        return {a for axis in axes for a in table.atoms(axis)}

    positions = atoms_of(axis for axes in outputs for axis in axes[: max(1, len(axes) - 1)])
    positions |= atoms_of(axis for use in products for axis in use.rows)
    features = atoms_of(axis for axes in outputs for axis in axes[1:][-1:])
    features |= atoms_of(axis for use in products for axis in use.kind.contracted(use))

    def is_feature(a: int) -> bool:
        return a not in positions and (a in features or "feature" in table.kinds(a))

    for use in uses:
        if use.kind.elementwise and not use.whole_examples:
            use.features = tuple(
                d
                for d, axis in enumerate(use.result)
                if (atoms := table.atoms(axis)) and all(map(is_feature, atoms))
            )


def _is_unknown(answer: Answer) -> bool:
    return answer.answer == "unknown"


def trace_marked(traced: Traced, params: PyTree, *args: Any, **finding: Any) -> Traced:
    """The program changed so that it returns a ``Marked``; unchanged if it has no marks.

    Its last argument is a list of zeros in the shape of each mark.

    Raises:
        HiddenMarkError: a mark is where its terms cannot be read.
        ValueError: a mark is of a value that does not depend on data.
    """
    closed, tree = traced.closed, traced.out_tree
    marks = tuple(marks_of(closed.jaxpr))
    if not marks:
        return traced

    def again(params: PyTree, *args: Any) -> Any:
        leaves = jax.tree.leaves((params, *args[:-1]))
        out = lifted(closed.jaxpr, closed.consts, leaves, args[-1])
        return out._replace(result=jax.tree.unflatten(tree, out.result))

    shifts = [mark.zeros() if varying_axes(mark.type) else mark.shape for mark in marks]
    traced_again = trace(again, params, *args, shifts, num_outputs=len(marks), **finding)
    for number, mark in enumerate(marks):
        if traced_again.output_axes(number) is None:
            raise ValueError(
                f"jk.mark_outputs: mark {number} (of shape {mark.shape.shape}) is of a value that "
                "does not depend on the batch, expected outputs of examples; mark what is computed "
                "from them"
            )
    return dataclasses.replace(traced_again, marks=marks)


def _refuse_encoded_parts(uses: Sequence[Use], encoded: frozenset[str]) -> None:
    """Refuse an encoded parameter in one value with others, which would get no gradient."""
    for use in uses if encoded else ():
        paths = {joined_use.view.path for joined_use in use.parts}
        further = sorted(paths - {use.view.path})
        if further and use.view.path in encoded:
            raise UncoveredParameterError(
                f"parameter {use.view.path!r} is held as NF4, which only the product of a dense "
                f"layer can read, and is added to, or stands in one array with, {further[0]!r}: "
                "keep this parameter in full precision"
            )


def find_layers(
    fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    layers: str | None = None,
    max_dense: int = 16384,
    experts: str | None = None,
    **named: Any,
) -> LayerTable:
    """Find every place where a parameter meets data in a linear operation.

    Args:
        fn: ``fn(params, *args)``, any JAX function: the apply function of a Flax, Haiku or
            Equinox model, or a loss. Shapes suffice: nothing is computed.
        params: Parameters; arrays or ``jax.ShapeDtypeStruct``, or NF4 (``jk.nf4``).
        *args: The other arguments, as arrays or ``jax.ShapeDtypeStruct``.
        layers: Full-match pattern over layer names; ``None`` is all.
        max_dense: A side with more features is stored as a diagonal.
        experts: Full-match pattern over parameter paths. If a free axis of a parameter can be read
            as outputs or as a stack of experts (``bti,eio->ebto``), the parameters that match are
            read as a stack. Shared axes always are.
        **named: Arguments of ``fn`` by name, in the same forms: ``key=``, ``state=``.

    Returns:
        A ``LayerTable``; ``print`` it for the coverage report.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> table = jk.find_layers(
        ...     lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        ...     {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((5, 3)))
        >>> table["w"].in_features, table["w"].bias.path
        (3, 'b')
    """

    def called(params: PyTree, named: dict[str, Any], *args: Any) -> Any:
        return fn(params, *args, **named)

    options: Any = {"layers": layers, "max_dense": max_dense, "experts": experts}
    called_fn, inputs = (called, (named, *args)) if named else (fn, args)
    options["state"] = named.get("state")
    traced = trace(called_fn, params, *inputs, **options)
    table = trace_marked(traced, params, *inputs, **options).table
    # A loss returns no outputs of examples, but an objective knows the outputs behind it.
    meeting = getattr(fn, "meeting", None)
    if meeting is None:
        return table
    return dataclasses.replace(table, meeting=meeting(params, *args, **named))
