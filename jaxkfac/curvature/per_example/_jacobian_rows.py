"""Rows of a Jacobian on one batch: the outputs' cotangents, and what backward passes gather."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree, leaves_by_path, partition, with_leaves
from jaxkfac._errors import UncoveredParameterError
from jaxkfac._jaxpr_compat import cast_varying
from jaxkfac.curvature import covered_indices, uncovered_mask
from jaxkfac.curvature.per_example._example_gradients import (
    ExampleGradients,
    check_readings,
    leaves_out_readings,
    refuse_meeting,
)
from jaxkfac.curvature.per_example._row_taps import (
    GatheredRows,
    GroupTaps,
    JointTaps,
    Probe,
    RowGroup,
    RowTaps,
    add_to_parameter,
    gathered,
    row_gradients,
)
from jaxkfac.factors import (
    Gaussian,
    Head,
    Linearised,
    ModelCall,
    Objective,
    Program,
    kept_targets,
    number_of_terms,
)
from jaxkfac.interception import (
    Layer,
    Traced,
    fast_convolutions,
    jaxpr_of,
    lifted,
    marks_of,
)
from jaxkfac.interception.coupling import Word
from jaxkfac.linalg import map_over_chunks, statistics_dtype

RowKind = Literal["outputs", "residuals", "losses"]

# ---------------- rows: the cotangents of outputs that they stand for


def _groups(traced: Traced, rows: RowKind) -> list[RowGroup]:
    """The rows by the examples of their outputs."""
    outputs_of: dict[Any, list[int]] = {}
    for k in range(traced.num_outputs):
        axes, shape = traced.output_axes(k), traced.out_shapes[k].shape
        atoms = traced.analysis.table.atoms(axes[0]) if axes else ()
        outputs_of.setdefault((atoms, shape[0] if shape else 1), []).append(k)
    return [
        RowGroup(
            atoms,
            number,
            tuple(outputs),
            (1,)
            if rows == "losses"
            else tuple(math.prod(traced.out_shapes[k].shape) // number for k in outputs),
        )
        for (atoms, number), outputs in outputs_of.items()
    ]


class Cotangents(NamedTuple):
    """The outputs' cotangents for rows of the Jacobian.

    Attributes:
        rows: What the rows are.
        heads: The outputs.
        scales: For each output the factor of each row, shaped like it, 0 at masked rows; ``None``
            for losses.
        losses: For losses, the gradient of the sum of all examples' losses, by output.
    """

    rows: RowKind
    heads: list[Head]
    scales: list[Array]
    losses: list[Array]

    @classmethod
    def of(cls, rows: RowKind, heads: list[Head]) -> "Cotangents":
        if rows == "losses":
            return cls(rows, heads, [], _loss_cotangents(heads))
        return cls(rows, heads, [_scale(rows, head) for head in heads], [])

    def column(self, group: RowGroup, column: Int[Array, ""]) -> list[Array]:
        """Cotangents for one row of every example of a group."""
        if self.rows == "losses":
            return self.losses
        cotangents, start = [jnp.zeros_like(scale) for scale in self.scales], 0
        for k, number in zip(group.outputs, group.columns, strict=True):
            one = jnp.arange(start, start + number, dtype=column.dtype) == column
            shape = self.scales[k].shape
            mine = jnp.broadcast_to(one.reshape(1, *shape[1:]), shape) if shape else one.any()
            cotangents[k] = jnp.where(mine, self.scales[k], cotangents[k])
            start += number
        return cotangents

    def sums(self, x: Float[Array, " rows"]) -> list[Array]:
        """Cotangents for the sum of all rows, each times its entry of ``x``."""
        if self.rows == "losses":
            return [
                one * x.astype(one.dtype).reshape(-1, *[1] * (one.ndim - 1)) for one in self.losses
            ]
        ends = np.cumsum([scale.size for scale in self.scales])[:-1].tolist()
        return [
            scale * part.astype(scale.dtype).reshape(scale.shape)
            for scale, part in zip(self.scales, jnp.split(x, ends), strict=True)
        ]

    def kept(self) -> Bool[Array, " rows"]:
        """Which rows exist, in the order of the outputs."""
        return jnp.concatenate([x.ravel() for x in self.kept_parts()])

    def kept_parts(self) -> list[Array]:
        """Which rows exist, for each output in its shape; for losses one entry, ``(examples,)``."""
        kept = []
        for head in self.heads:
            mask = jnp.ones((), bool) if head.kept is None else head.kept
            mask = jnp.expand_dims(mask, tuple(range(mask.ndim, head.outputs.ndim)))
            kept.append(jnp.broadcast_to(mask, head.outputs.shape))
        if self.rows == "losses":
            return [jnp.stack([x.reshape(x.shape[0], -1).any(1) for x in kept]).any(0)]
        return kept


def _scale(rows: RowKind, head: Head) -> Array:
    """The factor of each row of an output; 0 where the mask drops it."""
    ones = jnp.ones(head.outputs.shape, head.outputs.dtype)
    if rows == "outputs":
        return head._replace(scale=1.0, mask=head.kept).weighted(ones, 1.0)
    return _of_residual(head, ones)


def _of_residual(head: Head, x: Array) -> Array:
    """Values of a Gaussian output times the factor of its residuals."""
    if not isinstance(head.likelihood, Gaussian):
        raise ValueError(
            f"rows='residuals': {head.name} has {head.likelihood}, which has no residuals: take "
            "rows='outputs' or rows='losses', or jk.Gaussian()"
        )
    weight = jnp.sqrt(jnp.asarray(head.weight).astype(head.count.dtype) / head.count)
    return head.weighted(x, 0.5) * weight.astype(x.dtype)


def _varying_like(heads: list[Head], cotangents: list[Array]) -> list[Array]:
    """Inside ``shard_map`` a cotangent must vary over the mesh axes of its output."""
    both = zip(heads, cotangents, strict=True)
    return [cast_varying(cotangent, head.outputs) for head, cotangent in both]


def _residuals_of(head: Head) -> Array:
    """The residuals of a Gaussian output: half their squared norm is its part of the loss."""
    one = head.with_one_output()
    targets = kept_targets(one.targets, head.kept)
    difference = one.outputs - jnp.asarray(targets).astype(one.outputs.dtype)
    return _of_residual(head, difference.reshape(head.outputs.shape))


def _loss_cotangents(heads: list[Head]) -> list[Array]:
    """The gradient of the sum of all kept terms; NaN for examples whose loss is."""

    def total(outputs: list[Array]) -> tuple[Array, Array]:
        by_example = [
            head._replace(outputs=x).kept_terms().reshape(x.shape[0], -1).sum(1)
            for head, x in zip(heads, outputs, strict=True)
        ]
        dtype = statistics_dtype(*[x.dtype for x in by_example])
        losses = jnp.stack([x.astype(dtype) for x in by_example]).sum(0)
        return losses.sum(), losses

    outputs = [head.outputs for head in heads]
    cotangents, losses = jax.grad(total, has_aux=True)(outputs)
    # A target out of range has a loss of NaN whose gradient is finite.
    bad = lambda x: jnp.isnan(losses).reshape(-1, *[1] * (x.ndim - 1))
    return [jnp.where(bad(x), jnp.full((), jnp.nan, x.dtype), x) for x in cotangents]


CHUNK = 8  # examples of the second pass that run at once


# ---------------- one side of a Gram matrix: a program, its rows and its layers


class RowSource(NamedTuple):
    """What the rows are computed from.

    Attributes:
        objective: An ``Objective``, or a scalar loss that marks its outputs.
        rows: What the rows are.
        layers: Full-match pattern of layers; ``None`` for all.
        experts: As for the factors.
        examples: ``"apart"`` if the user says that examples do not meet where that is unknown.
        axes: Mapped axes whose devices hold the other rows.
        has_aux: Whether a scalar loss returns ``(value, aux)``.
    """

    objective: Any
    rows: RowKind
    layers: str | None = None
    experts: str | None = None
    examples: Word | None = None
    axes: tuple[str, ...] = ()
    has_aux: bool = False

    @property
    def has_outputs(self) -> bool:
        """Whether the objective returns outputs, and not a loss."""
        return isinstance(self.objective, Objective)

    def program(self) -> Program:
        """The program; that of an ``Objective`` is stored with it, with its traces."""
        finding = {"layers": self.layers, "experts": self.experts}

        def make() -> Program:
            options = {"has_aux": self.has_aux, "examples": self.examples, "axes": self.axes}
            return Program(self.objective, finding, cover=False, **options)

        if not self.has_outputs:
            return make()
        key = (RowSource, *finding.values(), self.examples, self.axes)
        return self.objective.programs.get(key, make)


def check_residuals(program: Program, traced: Traced) -> None:
    """Refuse a loss whose marks do not show its residuals.

    Raises:
        ValueError: a mark stands in the rule of a custom derivative, or the loss depends on
            parameters past its marks.
    """
    for number, mark in enumerate(traced.marks):
        if mark.beside:
            raise ValueError(
                f"rows='residuals': mark {number} stands in a function with a derivative of its "
                "own (custom_jvp), as in the energy of a wave function, which shows no residuals: "
                "take rows='scores' of jk.spring, or rows='outputs' of jk.jacobian"
            )
    if past := program.parameters_past_marks(traced):
        raise ValueError(
            f"rows='residuals': the loss depends on {past[0]!r} past its jk.mark_outputs, as with "
            "a penalty or an output that is not marked, and is not half the squared norm of its "
            "residuals: mark every output, and give a penalty on parameters as weight_decay="
        )


class EmittedRows(NamedTuple):
    """What a backward pass emits for the rows of a group.

    Attributes:
        at: The program, linearized.
        heads: The outputs.
        cotangents: The cotangents that rows stand for.
        slots: From the number of a row, the same for all examples, to what the taps emit.
    """

    at: Linearised
    heads: list[Head]
    cotangents: Cotangents
    slots: Callable[[Array], Any]


class GatheredSide(NamedTuple):
    """What the backward passes gathered for all rows.

    Attributes:
        groups: By group.
        emitted: What the pass of the last group emitted, with the outputs of all groups.
    """

    groups: list[GatheredRows]
    emitted: EmittedRows


class JacobianRows:
    """The rows of one batch: the traced program, its layers, and what no layer covers.

    Attributes:
        groups: The rows by their examples.
        second: The parameters whose gradients come from a second pass, with the reasons.
        selected: By parameter path, the indices of the elements that count.
        dtype: Dtype of the result.
    """

    def __init__(self, source: RowSource, call: ModelCall) -> None:
        self.source, self.call, self.program = source, call, source.program()
        self.traced = traced = self.program.traced(call)
        if traced.marks and source.rows == "losses":
            raise ValueError(
                "rows='losses': a scalar loss does not show the losses of its examples: take "
                "rows='residuals' or 'outputs', or give a jk.Objective"
            )
        if not source.has_outputs and not traced.marks:
            raise TypeError(
                "objective: expected a jk.Objective, or a scalar loss that marks its outputs "
                f"(jk.mark_outputs), whose outputs are known, got {source.objective!r}"
            )
        layers = [x for x in traced.table.tapped if not x.computed_from]
        if not layers and not traced.table.problems:
            raise UncoveredParameterError(
                "no parameter leads to the outputs, and their Jacobian is zero: check apply_fn"
            )
        self._check(layers)
        self.groups = _groups(traced, source.rows)
        self.second = self._uncovered(layers)
        self.selected = covered_indices(layers) | {path: {()} for path in self.second}
        free = partition(call.params)[0]
        dtypes = {path: statistics_dtype(leaf.dtype) for path, leaf in free.items()}
        outputs = [shape.dtype for shape in traced.out_shapes[: traced.num_outputs]]
        self.dtype = statistics_dtype(*dtypes.values(), *outputs)
        self._found = layers
        self.probes = [Probe(traced, layers, self.dtype_of, group) for group in self.groups]
        jax.eval_shape(self._probe, call)
        for layer in layers:
            uses = {id(use) for use in traced.uses_of(layer)}
            lost = any(uses & probe.lost for probe in self.probes)
            if lost or any(not group.atoms and group.number > 1 for group in self.groups):
                self._move(layer, "the rows of a layer cannot be told apart by example")
            elif masked := [
                u.view.history.masked for u in traced.uses_of(layer) if u.view.history.masked
            ]:
                self._move(layer, f"is masked by a constant in `{masked[0]}`")

    @property
    def layers(self) -> list[Layer]:
        """The layers that are tapped."""
        # A parameter of the second pass is taken as a whole: its readings in layers count there.
        return [layer for layer in self._found if any(self.parts(layer))]

    def dtype_of(self, layer: Layer) -> Any:
        """The dtype of what is gathered for a layer."""
        return self.dtype

    def parts(self, layer: Layer) -> tuple[bool, bool]:
        """Whether a layer's weight, and its bias, are not left to the second pass."""
        bias = layer.bias is not None and layer.bias.path not in self.second
        return layer.weight.path not in self.second, bias

    def _move(self, layer: Layer, reason: str) -> None:
        for matrix in filter(None, (layer.weight, layer.bias)):
            self.second.setdefault(matrix.path, reason)

    def _check(self, layers: list[Layer]) -> None:
        """Refuse examples that meet, and layers that leave out a reading of their parameters."""
        source, traced = self.source, self.traced
        if source.has_outputs:
            met = self.program.meeting(traced, "derivative")
        else:
            marks = range(len(traced.marks))
            met = next(filter(None, (traced.meeting_at(k, source.examples) for k in marks)), "")
        refuse_meeting(", ".join(repr(layer.name) for layer in layers), met)
        if source.layers is not None and leaves_out_readings(traced, tuple(layers)):
            everything = source._replace(layers=None).program()
            check_readings(tuple(layers), everything.traced(self.call))

    def _uncovered(self, layers: list[Layer]) -> dict[str, str]:
        leaves = leaves_by_path(self.call.params)
        uncovered = dict(self.traced.table.problems)
        for path in uncovered:
            if jnp.issubdtype(leaves[path].dtype, jnp.complexfloating):
                raise UncoveredParameterError(
                    f"{path!r} is complex ({leaves[path].dtype}), and a Gram matrix of gradients "
                    "is real: leave it out with layers="
                )
        return uncovered

    # -- passes -----------------------------------------------------------------------

    def _emitted(self, taps: Sequence[GroupTaps], call: ModelCall) -> Iterator[EmittedRows]:
        """What the taps of each group emit, in one pass for all groups if they can share it."""
        if not self._joint(taps):
            for one, group in zip(taps, self.groups, strict=True):
                at, heads, cotangents = self._at(one.of((call.params, call.batch)), call)
                tree = at.terms_of.tree
                columns = functools.partial(cotangents.column, group)
                emitted = lambda column, at=at, columns=columns, tree=tree, heads=heads: at.vjp(
                    tree(_varying_like(heads, columns(column)))
                )
                yield EmittedRows(at, heads, cotangents, emitted)
            return
        joint = JointTaps(taps).of((call.params, call.batch))
        at, heads, cotangents = self._at(joint, call)
        first = jnp.zeros((), jnp.int32)
        seeds = [cotangents.column(group, first) for group in self.groups]
        whole = [seeds[self._group_of(k)][k] for k in range(len(heads))]
        slots = at.vjp(at.terms_of.tree(_varying_like(heads, whole)))
        for k in range(len(taps)):
            own = {n: sums.parts[k] for n, sums in slots.items() if sums.parts[k] is not None}
            yield EmittedRows(at, heads, cotangents, lambda _, own=own: own)

    def _at(self, taps: Any, call: ModelCall) -> tuple[Any, list[Head], Cotangents]:
        """The program linearized with taps, its outputs, and the cotangents of the rows."""
        at = self.program.linearise(self.traced, taps, call, differentiate=False)
        assert at.terms_of is not None
        mask = call.batch.mask if self.source.has_outputs else None
        targets = call.batch.targets if self.source.has_outputs else None
        heads = at.terms_of.heads(at.outputs, targets, mask)
        return at, heads, self.cotangents_of(heads)

    def _joint(self, taps: Sequence[GroupTaps]) -> bool:
        """Whether one pass serves all groups: each use then has cotangents of one of them."""
        if len(taps) == 1 or any(group.per_example > 1 for group in self.groups):
            return False
        uses = [use for layer in self._found for use in self.traced.uses_of(layer)]
        return all(sum(one.leads_there(use) for one in taps) <= 1 for use in uses)

    def _group_of(self, output: int) -> int:
        return next(k for k, group in enumerate(self.groups) if output in group.outputs)

    def _probe(self, call: ModelCall) -> list[Any]:
        first = jnp.zeros((), jnp.int32)
        return [one.slots(first) for one in self._emitted(self.probes, call)]

    @functools.cached_property
    def _linearised(self) -> Linearised:
        """A scalar loss, linearized without taps."""
        none = ExampleGradients(self.traced, [], self.dtype_of, (), 1)
        return self.program.linearise(self.traced, none, self.call)

    @functools.cached_property
    def _outputs_and_vjp(self) -> tuple[ArrayTree, Callable[[ArrayTree], tuple[dict[str, Any]]]]:
        return jax.vjp(self._outputs_of, self._chosen)

    @property
    def _chosen(self) -> dict[str, Array]:
        leaves = leaves_by_path(self.call.params)
        return {path: jnp.asarray(leaves[path]) for path in self.selected}

    @functools.cached_property
    def _outputs_of(self) -> Callable[[dict[str, Array]], ArrayTree]:
        """From the selected parameters to the outputs, or the marked ones."""
        params, batch, key, state = self.call
        objective = self.source.objective
        if self.source.has_outputs:
            whole = lambda chosen: with_leaves(params, chosen)
            return lambda chosen: objective.outputs(whole(chosen), batch.inputs, key, state)[0]
        value = lambda chosen: self.program.value(
            self.call._replace(params=with_leaves(params, chosen))
        )
        closed, _ = jaxpr_of(value, self._chosen)
        none = [None] * len(marks_of(closed.jaxpr))
        return lambda chosen: (
            lifted(closed.jaxpr, closed.consts, jax.tree.leaves(chosen), none).outputs
        )

    @functools.cached_property
    def terms(self) -> Any:
        """The loss terms of the outputs, which know the devices that hold the others."""
        if not self.source.has_outputs:
            assert self._linearised.terms_of is not None
            return self._linearised.terms_of
        outputs = self._outputs_and_vjp[0]
        return self.source.objective.of_batch(outputs, self.call.batch, self.source.axes)

    @functools.cached_property
    def heads(self) -> list[Head]:
        """The outputs with their likelihoods, targets and masks."""
        if not self.source.has_outputs:
            return self.terms.heads(self._linearised.outputs)
        batch = self.call.batch
        return self.terms.heads(self._outputs_and_vjp[0], batch.targets, batch.mask)

    def vjp(self, cotangents: list[Array]) -> dict[str, Array]:
        """Gradients of the selected parameters for cotangents of the outputs."""
        cotangents = _varying_like(self.heads, cotangents)
        if not self.source.has_outputs:
            assert self._linearised.gradient is not None
            gradients = self._linearised.gradient(cotangents)
            return {path: gradients[path] for path in self.selected}
        return self._outputs_and_vjp[1](self.terms.tree(cotangents))[0]

    def tangents(self, vector: dict[str, Array]) -> list[Array]:
        """Derivatives of the outputs along a vector, which may lack some of the parameters."""
        chosen = self._chosen
        along = {
            path: vector[path].astype(x.dtype) if path in vector else jnp.zeros_like(x)
            for path, x in chosen.items()
        }
        along = {path: self.elements(path, x) for path, x in along.items()}
        outputs = jax.jvp(self._outputs_of, (chosen,), (along,))[1]
        return [head.outputs for head in self.terms.heads(outputs)]

    def residuals(self, emitted: EmittedRows | None = None) -> list[Array]:
        """The residuals of each output, shaped like it.

        Args:
            emitted: What the passes for the rows computed besides them, if they have run.

        Raises:
            ValueError: rows are not residuals; a mark has no cotangent, or depends on another; or
                the loss depends on parameters past its marks.
        """
        if self.source.rows != "residuals":
            raise ValueError(f"rows={self.source.rows!r} have no residuals: take rows='residuals'")
        heads = self.heads if emitted is None else emitted.heads
        if self.source.has_outputs:
            return [_residuals_of(head) for head in heads]
        check_residuals(self.program, self.traced)
        at = self._linearised if emitted is None else emitted.at
        assert at.cotangents is not None
        # What the Fisher takes is over the root of the number of terms.
        terms = jnp.sqrt(number_of_terms(heads))
        return [x * terms.astype(x.dtype) for x in at.cotangents()]

    def cotangents_of(self, heads: list[Head]) -> Cotangents:
        """The cotangents that the rows stand for."""
        return Cotangents.of(self.source.rows, heads)

    def elements(self, path: str, gradient: Array) -> Array:
        """A parameter's gradient with zeros for elements that are not selected."""
        left_out = uncovered_mask(self.traced.shapes[path], self.selected[path])
        return jnp.where(left_out, jnp.zeros((), gradient.dtype), gradient)

    def places(self, layer: Layer, probe: Probe) -> tuple[dict[int, int], int]:
        """Where the positions of each use begin among those of all, and the number of all."""
        places, total = {}, 0
        for use in self.traced.uses_of(layer):
            if id(use) in probe.positions:
                places[id(use)] = total
                total += probe.positions[id(use)]
        return places, total

    def gathered(self, by_pairs: Collection[str], by_rows: Mapping[str, bool]) -> GatheredSide:
        """What the backward passes gather.

        Args:
            by_pairs: The layers whose rows are multiplied in pairs.
            by_rows: The layers whose gradients are formed from their rows, and whether other layers
                read the same elements.
        """
        layers = {x.name: x for x in self.layers if x.name in by_pairs or x.name in by_rows}
        taps = []
        for group, probe in zip(self.groups, self.probes, strict=True):
            both = {name: self.places(layer, probe) for name, layer in layers.items()}
            places = {name: starts for name, (starts, _) in both.items()}
            positions = {name: total for name, (_, total) in both.items()}
            taps.append(RowTaps(self.traced, self.layers, self.dtype_of, group, places, positions))
        out, emitted = [], None
        for one, group, emitted in zip(
            taps, self.groups, self._emitted(taps, self.call), strict=True
        ):
            found = gathered(one, emitted.slots, group, layers)
            leaves = {path: x for path, x in found.leaves.items() if path not in self.second}
            for name, is_tied in by_rows.items():
                self._form(found, layers[name], is_tied=is_tied)
            if self.second:
                # An example that can run alone takes one pass for its rows, not one for each. With
                # a key it would draw other random numbers there.
                alone = self.source.has_outputs and self.call.key is None
                alone = alone and not self.program.meeting(self.traced, "value", alone=True)
                second = self._alone if alone else self._row_by_row
                leaves |= second(group, emitted.cotangents)
            out.append(found._replace(leaves=leaves, by_gradients=frozenset(by_rows)))
        assert emitted is not None
        return GatheredSide(out, emitted)

    def _form(self, found: GatheredRows, layer: Layer, *, is_tied: bool) -> None:
        """Form the gradients of a layer from its rows."""
        weight, bias = self.parts(layer)
        rows = found.rows[layer.name]
        if not is_tied:
            found.formed["rows", layer.name] = row_gradients(rows, weight=weight, bias=bias)
            return
        parts = (layer.weight, weight, False), (layer.bias, False, bias)
        for matrix, of_weight, of_bias in parts:
            if matrix is None or not (of_weight or of_bias):
                continue
            gradients = row_gradients(rows, weight=of_weight, bias=of_bias)
            shape = *gradients.shape[:2], *self.traced.shapes[matrix.path]
            leaf = found.formed.get(matrix.path, jnp.zeros(shape, gradients.dtype))
            found.formed[matrix.path] = add_to_parameter(leaf, layer, matrix, gradients)

    # -- the second pass, for parameters that no layer covers: ``(N, D, *parameter)`` by path --

    def _alone(self, group: RowGroup, cotangents: Cotangents) -> dict[str, Array]:
        """Each example is run by itself."""
        params, batch, key, state = self.call
        objective, leaves = self.source.objective, leaves_by_path(params)
        chosen = {path: leaves[path] for path in self.second}
        columns = jnp.arange(group.per_example, dtype=jnp.int32)
        seeds = jax.vmap(lambda column: cotangents.column(group, column), out_axes=1)(columns)

        def of_example(example: tuple[ArrayTree, list[Array]]) -> dict[str, Array]:
            inputs, seeds = example
            inputs = jax.tree.map(lambda x: x[None], inputs)

            def outputs_of(chosen: dict[str, Array]) -> list[Array]:
                outputs = objective.outputs(with_leaves(params, chosen), inputs, key, state)[0]
                return objective.parts(outputs, "apply_fn: outputs")

            vjp = jax.vjp(outputs_of, chosen)[1]
            gradients = jax.vmap(lambda *one: vjp([x[None] for x in one])[0])(*seeds)
            return self._second_parts(gradients)

        examples = batch.inputs, seeds
        try:
            some = lambda chunk, _: jax.vmap(of_example)(chunk)
            return map_over_chunks(some, examples, CHUNK, in_loop=fast_convolutions)
        except NotImplementedError:  # an operation that JAX cannot batch, as a grouped product
            return self._row_by_row(group, cotangents)

    def _row_by_row(self, group: RowGroup, cotangents: Cotangents) -> dict[str, Array]:
        """Each row takes a backward pass of the whole program, with cotangents of this row alone.

        So nothing has to be known of the program but that its examples do not meet.
        """
        vjp = self.vjp

        def of_row(row: Int[Array, ""]) -> dict[str, Array]:
            example, column = row // group.per_example, row % group.per_example

            def alone(x: Array, output: int) -> Array:
                if output not in group.outputs or not x.ndim:
                    return x
                mine = jnp.arange(x.shape[0], dtype=row.dtype) == example
                mine = mine.reshape(-1, *[1] * (x.ndim - 1))
                return jnp.where(mine, x, jnp.zeros((), x.dtype))

            columns = cotangents.column(group, column)
            gradients = vjp([alone(x, k) for k, x in enumerate(columns)])
            return self._second_parts(jax.tree.map(lambda x: x[None], gradients))

        rows = jax.lax.map(fast_convolutions(of_row), jnp.arange(group.size, dtype=jnp.int32))
        shape = group.number, group.per_example
        return {path: x.reshape(*shape, *x.shape[2:]) for path, x in rows.items()}

    def _second_parts(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """The selected elements of the parameters of the second pass; the rows come first."""
        of_path = lambda path: jax.vmap(lambda x: self.elements(path, x))(gradients[path])
        return {path: of_path(path).astype(self.dtype) for path in self.second}
