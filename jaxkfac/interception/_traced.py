"""A traced function: its layers, where its examples meet, and its emission with handlers."""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._jaxpr_compat import typed_like
from jaxkfac.interception._analysis import Analysis
from jaxkfac.interception._elements import Elements
from jaxkfac.interception._examples import (
    leading_to,
)
from jaxkfac.interception._kind import Data, Use
from jaxkfac.interception._layer import Layer, LayerTable, ParameterMatrix
from jaxkfac.interception._mark_outputs import OutputMark
from jaxkfac.interception._rewrite import Around, Handler, Rewriter
from jaxkfac.interception._row_masks import RowMask
from jaxkfac.interception.coupling import (
    Answer,
    Answers,
    Question,
    Word,
    answers,
    label_inputs,
    leading_labels,
)
from jaxkfac.interception.values._axes import Atoms, Axes
from jaxkfac.interception.values._encoded import (
    DeferredParameter,
    decoded_shapes,
    is_encoded,
    refuse_deferred,
)
from jaxkfac.interception.values._index import shape_of
from jaxkfac.interception.values._slots import Slot, Statistic, Window


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
        # With `isolated` each backward pass sees one example's cotangents, so all rows belong to
        # it.
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
        # A single "yes" decides for all outputs; without one, a single "unknown" does.
        return next(
            (x for x in all_answers if x.answer == "yes"), max(all_answers, key=_is_unknown)
        )

    def meeting(self) -> str:
        """Where examples meet, for the layer table, assuming that the outputs lead with them.

        The answer is empty for an output without further axes, and for one whose leading axis is
        not as long as that of any input: such an output says nothing.
        """
        if not self.leads_with_examples:
            return ""
        value, derivative = (self.examples_meet(q, output=0) for q in ("value", "derivative"))
        if value == derivative:
            return "" if value.answer == "no" else str(value)
        return f"in values, {value}; in derivatives, {derivative}"

    @property
    def leads_with_examples(self) -> bool:
        """Whether the first output may be one of examples: its leading axis is that of an input.

        ``find_layers`` knows no likelihood, and a function may return anything. A vector is as
        likely one number for each class as one for each example, and does not count.
        """
        shape = self.out_shapes[0].shape if self.out_shapes else ()
        inputs = [self._in_shapes[k] for k in self.analysis.axes_of_input]
        return len(shape) > 1 and shape[0] != 1 and any(x[:1] == shape[:1] for x in inputs)

    def is_by_example(self, index: int) -> bool:
        """Whether the leading axis of an argument is known to be the examples.

        Args:
            index: Number of the leaf among those of the arguments behind the parameters.
        """
        axes = self.analysis.axes_of_input.get(len(self.shapes) + index)
        if not axes:
            return False
        atoms = self.analysis.table.atoms(axes[0])
        return bool(atoms) and any(atoms == examples for examples, _ in self.example_axes)

    @functools.cached_property
    def _answers(self) -> list[Answers]:
        """Both answers for each output."""
        table = self.analysis.table
        # Outputs with the same examples share one walk over the program, which is what takes the
        # time.
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
        # Unlike `_answers`, entry i of every input must be example i: the second pass slices all
        # inputs at one index, whatever axis the program links to the outputs.
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
            # Axes are told apart by atoms and not by length: two outputs of equal length may have
            # different examples.
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

    def meeting_at(self, mark: int, examples: Word | None) -> str:
        """Say where a term of a mark has a derivative in rows of several examples, if anywhere.

        Either examples meet on the way (batch statistics, a tower times itself), or a layer use has
        rows that do not run along the mark's example axis (a contrastive loss of two towers).
        """
        answer = self.examples_meet("derivative", output=mark)
        if not answer.lets_pass(examples):
            return str(answer)
        table, axes = self.analysis.table, self.output_axes(mark) or ()
        example_atoms = {a for axis in axes[:1] for a in table.atoms(axis)}
        for use in leading_to(self.analysis.plan, mark)[0]:
            rows = {a for axis in use.axes.rows for a in table.atoms(axis)}
            # Such a row belongs to several examples, and one backward pass for all of them would
            # add up their cotangents there.
            if example_atoms and use.data is not None and not example_atoms <= rows:
                return f"the examples meet behind layer {use.layer or use.view.source.path!r}"
        return ""

    def with_second_pass(
        self, *, outputs: bool, gradients: bool = True, examples: Word | None = None
    ) -> "Traced":
        """The program; its table lists as uncovered what only a second pass could cover.

        That holds where the pass cannot run: examples meet, or are not known.

        Args:
            outputs: Whether the results are a model's outputs, and not a loss.
            gradients: Whether the pass has gradients to square.
            examples: ``"apart"`` if the user says that examples do not meet where that is unknown.
        """
        if not self.table.second_pass:
            return self
        behind = "is behind a weight that is computed from it, and its diagonal is"
        if not outputs and not self.marks:
            reason = (
                f"{behind} one of whole examples' gradients, which need a jk.Objective or "
                "jk.mark_outputs"
            )
        elif not gradients:
            reason = f"{behind} one of gradients, which this Fisher type has none of"
        else:
            met = self._meeting_of_single_examples(examples)
            reason = f"{behind} one of single examples' gradients, and {met}" if met else ""
        if not reason:
            return self
        return dataclasses.replace(self, table=self.table.without_second_pass(reason))

    def _meeting_of_single_examples(self, examples: Word | None) -> str:
        """Where examples meet, or may, so that none can run by itself; empty if nowhere."""
        if not self.marks:
            answer = self.examples_meet("value", alone=True)
            return "" if answer.lets_pass(examples) else str(answer)
        meetings = (self.meeting_at(mark, examples) for mark in range(len(self.marks)))
        met = next(filter(None, meetings), "")
        if met and "not known" not in met:
            return f"examples meet on their way to a jk.mark_outputs: {met}"
        return met

    @property
    def unmarked(self) -> list[Layer]:
        """The layers that lead to none of the marks; none where the loss has no marks."""
        return [
            layer
            for layer in self.table.tapped
            if self.marks and not any(id(use) in self.marks_reached for use in self.uses_of(layer))
        ]

    def uses_of(self, layer: Layer) -> list[Use]:
        """The uses of a layer, in program order."""
        return self._uses[layer.name]

    @functools.cached_property
    def _uses(self) -> dict[str, list[Use]]:
        uses_by_layer = collections.defaultdict(list)
        for use in self.analysis.plan.all_uses():
            # A stacked parameter may repeat a name, once for each iteration; a use counts once for
            # its layer.
            for name in dict.fromkeys(use.layers):
                if name is not None:
                    uses_by_layer[name].append(use)
        return uses_by_layer

    def run(
        self,
        handler: Handler,
        params: ArrayTree,
        slots: Mapping[str, Slot],
        *args: Any,
        masks: list[RowMask] | None = None,
        windows: Mapping[str, Window] | None = None,
    ) -> Any:
        """Run the function with ``handler`` in place of its layer uses.

        Args:
            handler: See ``_rewrite.Handler``.
            params: Parameters, with the structure and shapes of the trace.
            slots: ``{layer name: slot}``; layers without a slot stay unchanged.
            *args: The remaining arguments.
            masks: Which rows exist, for the layers whose rows run along their axes.
            windows: For some layers of a scan, the iterations for which their slots have rows.

        Raises:
            ValueError: the sums of a slot are no record that declares powers.
        """
        for name, slot in slots.items():
            if slot.sums is not None and not isinstance(slot.sums, Statistic):
                raise ValueError(
                    f"the slot of layer {name!r} has sums of type {type(slot.sums).__name__}, "
                    "which declares no powers: make them a record, a class under @statistic"
                )
        by_path = collections.defaultdict(dict)
        computed = {name: slot for name, slot in slots.items() if self.table[name].computed_from}
        traced_indices = collections.defaultdict(set)
        for use in self.analysis.plan.all_uses():
            for name in slots.keys() & use.layers:
                slot, weight = slots[name], self.table[name].weight
                if self.table[name].is_elementwise:
                    slot = Elements.of(slot.sums, weight.index, self.shapes[weight.path])
                # Slots go with the parameter through the program: the rewriter slices, stacks and
                # passes them down exactly as it does the parameter, by its path.
                by_path[weight.path][name] = slot
                # Slots of layers that are stacked for a scan go under the name of the first layer.
                for layer in (name, use.layer or name):
                    traced_indices[layer].update(c.traced_index for c in use.view.source.consumed)
        rewriter = Rewriter(
            table=self.analysis.table,
            handler=handler,
            marks=tuple(m.axes for m in self.analysis.plan.all_marks()),
            traced_indices=traced_indices,
            windows=windows or {},
            encoded=self.encoded,
        )
        paths = leaves_by_path(decoded_shapes(params))
        # An encoded parameter (NF4) is a tree of several arrays, and one parameter of the program.
        leaves = jax.tree.leaves(params, is_leaf=is_encoded)
        flat = [
            DeferredParameter.of(leaf, path) if is_encoded(leaf) else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        input_slots = [by_path.get(path, {}) for path in paths]
        flat += jax.tree.leaves(args)
        input_slots += [{}] * (len(flat) - len(input_slots))
        around = Around(masks or [], {}, computed)
        out = rewriter.rewrite(self.analysis.plan, flat, input_slots, around)
        # A deferred parameter is decoded where it is used; the caller would get an object, not an
        # array.
        refuse_deferred(enumerate(out), lambda _: "the caller: the function returns it")
        # A result that does not depend on the arguments is a literal of the program, a Python
        # number, which a caller's `eqx.filter_jit` takes for a static value.
        out = [typed_like(x, v.aval) for x, v in zip(out, self.closed.jaxpr.outvars, strict=True)]
        return jax.tree.unflatten(self.out_tree, out)


def _is_unknown(answer: Answer) -> bool:
    return answer.answer == "unknown"
