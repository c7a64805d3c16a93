"""A loss traced once and linearized with taps; factors and EKFAC both build on it."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    check_params,
    leaves_by_path,
    partition,
    with_leaves,
)
from jaxkfac._errors import LostRowsError
from jaxkfac._jaxpr_compat import cast_varying, varying_axes
from jaxkfac._mapped_axes import axes_apart, num_devices, sum_over_devices
from jaxkfac.factors._loss_terms import LossTerms, common_scale, number_of_terms
from jaxkfac.factors._marks import (
    MarkedTerms,
    check_marked_outputs,
    leads_past_marks,
    parameters_past_marks,
    refuse_beside,
    refuse_chained,
    refuse_marks,
    refuse_unmarked,
    row_weights,
    weighed,
    with_weights_apart,
)
from jaxkfac.factors._model_call import Batch, ModelCall, check_array, form_of, returned
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._taps import Emitter, tap
from jaxkfac.interception import (
    Marked,
    RowMask,
    Site,
    TraceCache,
    Traced,
    check_weights,
    trace,
    trace_marked,
)
from jaxkfac.interception.coupling import Question, Word
from jaxkfac.interception.values import Window
from jaxkfac.linalg import statistics_dtype


class Linearised(NamedTuple):
    """A program linearized at one point.

    Attributes:
        value: The mean loss; over all devices of the axes that ``axis_name=`` names, as are
            ``grads`` and ``terms``.
        aux: What the model returned with its outputs: aux, the changed state, or both.
        grads: ``{path: gradient}`` of the leaves that have one.
        emitted: Statistics of the gradient's own backward pass, of this device's rows.
        terms: Number of loss terms.
        outputs: Outputs of the model; ``None`` for a scalar loss.
        vjp: From a cotangent of the outputs to the statistics of another backward pass of
            the same linearisation; ``None`` for a scalar loss.
        terms_of: The loss terms of the outputs; ``None`` for a scalar loss.
        batch: The batch, in the form an ``Estimator`` takes.
        own: Gives the loss's own cotangents, scaled to those of its Fisher. ``None`` if
            ``emitted`` already belongs to them, except for ``own_scale``.
        own_scale: The factor for squares of ``emitted`` in that case; ``None`` for one.
        cotangents: For a loss with marks: like ``own``, and there even if ``own`` is ``None``.
        gradient: For a loss with marks: maps a cotangent of the outputs to the parameters'.
    """

    value: Any
    aux: Any
    grads: dict[str, Any]
    emitted: dict[str, Any]
    terms: Any
    outputs: Any = None
    vjp: Any = None
    terms_of: LossTerms | None = None
    batch: Any = None
    own: Callable[[], ArrayTree] | None = None
    own_scale: Any = None
    cotangents: Callable[[], ArrayTree] | None = None
    gradient: Callable[[ArrayTree], dict[str, Any]] | None = None

    @property
    def squares_to_sums(self) -> Float[Array, ""]:
        """The factor that turns squares into sums over terms; NaN where the loss is NaN.

        Inside ``shard_map`` it is NaN on all devices if the loss is NaN on one of them, because
        values that are summed over devices must stay equal on all.

        The taps saw gradients of the *mean* loss. Multiplied by the number of terms they become
        gradients of each example's sum. A loss is NaN if a target is out of range; sampled labels
        alone would not show that.
        """
        nan = jnp.asarray(jnp.nan, self.terms.dtype)
        bad, axes = jnp.isnan(self.value), tuple(sorted(varying_axes(self.value)))
        if axes:
            bad = jax.lax.psum(bad.astype(jnp.int32), axes) > 0
        return jnp.where(bad, nan, jnp.square(self.terms))

    @property
    def all_terms(self) -> Float[Array, ""]:
        """Number of terms in the sums of factors; inside ``shard_map`` over all devices.

        Raises:
            ValueError: devices may keep different numbers of terms, so that gradients of their
                means cannot be squared and added.
        """
        axes = tuple(sorted(varying_axes(self.value)))
        if not axes:
            return self.terms
        if varying_axes(self.terms):
            raise ValueError(
                "a mask inside jax.shard_map may keep different numbers of loss terms on the "
                "devices, so their statistics have no common scale: name the axis with axis_name= "
                "of jk.value_grad_and_factors, which pools the terms of all devices, or leave the "
                "mask out"
            )
        return self.terms * math.prod(map(jax.lax.axis_size, axes))

    def poisoned(self, sums: dict[str, Array]) -> dict[str, Array]:
        """Sums over terms, with NaN where the loss is NaN."""
        bad = jnp.isnan(self.squares_to_sums)
        return jax.tree.map(lambda x: jnp.where(bad, jnp.full((), jnp.nan, x.dtype), x), sums)


class Program:
    """A loss and its traces, one for each set of shapes.

    Args:
        objective: An ``Objective``, or a scalar loss.
        finding: How layers are found; see ``trace``.
        cover: Whether an uncovered parameter raises.
        second_pass: Whether the caller can cover such a parameter with a second pass.
        has_aux: Whether a scalar loss returns ``(value, aux)``.
        examples: ``"apart"`` if the user says that examples do not meet where that is unknown.
        axes: Mapped axes over whose devices value, gradient and statistics are summed.
    """

    def __init__(
        self,
        objective: Callable[..., Any],
        finding: Mapping[str, Any],
        *,
        cover: bool,
        second_pass: bool = False,
        has_aux: bool = False,
        examples: Word | None = None,
        axes: tuple[str, ...] = (),
    ) -> None:
        self.objective: Any = objective
        self.axes = axes
        self._finding, self._cover, self._second_pass = finding, cover, second_pass
        self._has_aux = has_aux
        self.examples: Word | None = examples
        self._traces: TraceCache[Traced] = TraceCache()

    def on_one_device(self) -> "Program":
        """The program without its axes, for shapes, which need no map; it shares the traces."""
        alone = copy.copy(self)
        alone.axes = ()
        return alone

    def traced(self, call: ModelCall) -> Traced:
        """The trace for these shapes.

        Raises:
            UncoveredParameterError: no layer covers a parameter, and ``cover`` is set.
            ValueError: there are no parameters.
        """
        params, batch, key, state = call
        check_arrays("params", params)
        check_params(leaves_by_path(params))
        if not jax.tree.leaves(params):
            raise ValueError("params: the tree holds no arrays")
        lead = isinstance(self.objective, Objective)
        # Targets and mask are no arguments of the model, so another mask needs no other trace.
        args = (params, batch.inputs if lead else batch, key, state)

        def make() -> Traced:
            finding = {"state": state, **self._finding}
            if lead:
                traced = self.objective.traced(*args, **self._finding)
                refuse_marks(traced)
                shape = ()
            else:
                traced = trace(self._forward, *args, **finding)
                shape = traced.out_shapes[0].shape
                traced = trace_marked(traced, *args, **finding)
                refuse_unmarked(traced)
                traced = with_weights_apart(traced)
            traced = traced.with_second_pass(
                outputs=lead, gradients=self._second_pass, examples=self.examples
            )
            # The remedy that the message offers, a second pass over single examples, must be one
            # that works.
            if self._cover and traced.table.problems:
                alone = self._second_pass and lead and not self.meeting(traced, "value", alone=True)
                traced.table.raise_uncovered(second_pass=alone)
            if shape != ():  # of a custom derivative it is known now: its rule decides
                raise ValueError(
                    f"the loss has shape {shape}, expected a scalar mean over rows; give a model "
                    "and a likelihood as jk.Objective instead"
                )
            return traced

        return self._traces.get(args, make)

    def meeting(self, traced: Traced, question: Question, *, alone: bool = False) -> str:
        """Where examples meet, or may, in words; empty if proved or declared not to.

        Args:
            traced: The program.
            question: See ``Traced.examples_meet``.
            alone: See ``Traced.examples_meet``.
        """
        answer = traced.examples_meet(question, alone=alone)
        return "" if answer.lets_pass(self.examples) else str(answer)

    def parameters_past_marks(self, traced: Traced) -> list[str]:
        """Paths of the parameters on which the loss depends past its marks."""
        return parameters_past_marks(traced)

    def row_weights(self, traced: Traced, call: ModelCall) -> dict[str, Any]:
        """See ``_marks.row_weights``; runs the forward pass only if masks or weights need it."""
        if not weighed(traced):
            return {}
        shifts = [mark.zeros() for mark in traced.marks]
        # Weights that are numbers are known without a run of the model; arrays and masks are not.
        weights, masks = {}, {}
        if any(mark.masked or mark.weight is None for mark in traced.marks):
            params, *args = call
            out = traced.run(_no_handler, params, {}, *args, shifts)
            weights, masks = jax.lax.stop_gradient((out.weights, out.masks))
        terms = MarkedTerms(traced.marks, weights, masks).over_devices(shifts, self.axes)
        return row_weights(traced, terms.heads(shifts))

    def _linearise_marked(
        self,
        traced: Traced,
        run: Callable[..., Marked],
        free: dict[str, Array],
        zeros: dict[str, Any],
    ) -> Linearised:
        """Value, gradient and statistics of a loss that marks its outputs."""

        def forward(free: dict[str, Array], sums: dict[str, Any], shifts: list[Array]) -> ArrayTree:
            out = run(free, sums, shifts)
            value, aux = out.result
            return (out.outputs, value), (aux, out.weights, out.masks)

        shifts = [mark.zeros() for mark in traced.marks]
        (outputs, value), vjp, (aux, weights, masks) = jax.vjp(
            forward, free, zeros, shifts, has_aux=True
        )
        # The value alone is differentiated; the marked outputs are results only so that later
        # passes can start from them.
        none = jax.tree.map(jnp.zeros_like, outputs)
        meeting = functools.partial(traced.meeting_at, examples=self.examples)
        terms_of = MarkedTerms(traced.marks, weights, masks, meeting)
        terms_of = terms_of.over_devices(outputs, self.axes)
        fixed = jax.lax.stop_gradient(outputs)
        own_value, share, no_value = value, jnp.ones_like(value), jnp.zeros_like(value)
        if terms_of.axes:
            share = cast_varying(terms_of.share(fixed, value).astype(value.dtype), value)
        # Shifts are zeros added to the outputs: their cotangents are the loss's gradients there.
        grads, emitted, cotangents = vjp((none, share))
        if terms_of.axes:
            value, grads = sum_over_devices((value * share, grads), terms_of.axes)
        heads = terms_of.heads(fixed)
        check_marked_outputs(heads)
        scale = common_scale(heads)

        beside = any(mark.beside for mark in traced.marks)

        def fisher_cotangents() -> ArrayTree:
            refuse_beside(traced)
            refuse_chained(traced)
            own = cotangents
            if terms_of.axes and len(traced.marks) > 1:
                own = terms_of.as_if_pooled(fixed, own, own_value)
            return terms_of.rescaled(fixed, own, None)

        return Linearised(
            value,
            aux,
            grads,
            emitted,
            number_of_terms(heads),
            fixed,
            lambda g: vjp((g, no_value))[1],
            terms_of,
            Batch(None, None, None),
            fisher_cotangents if scale is None or beside or leads_past_marks(traced) else None,
            scale,
            fisher_cotangents,
            lambda g: vjp((g, no_value))[0],
        )

    def output_shapes(self, traced: Traced) -> ArrayTree:
        """Shapes of the outputs that have a likelihood, in its form."""
        return self.objective.tree(traced.out_shapes[: traced.num_outputs])

    def value(self, call: ModelCall) -> Float[Array, ""]:
        """The value of a scalar loss, without taps."""
        return self._forward(*call)[0]

    def _forward(
        self,
        params: ArrayTree,
        data: ArrayTree,
        key: Key[Array, ""] | None,
        state: ArrayTree | None,
    ) -> ArrayTree:
        if isinstance(self.objective, Objective):
            return self.objective.outputs(params, data, key, state)
        value, beside = returned(
            "the loss", self.objective, (params, data), key, state, self._has_aux
        )
        if isinstance(value, tuple | list | dict):
            raise ValueError(
                f"the loss returns {form_of(value)}, expected a scalar: for (loss, aux) say "
                "has_aux=True"
            )
        return value, beside

    def linearise(
        self,
        traced: Traced,
        emitter: Emitter,
        call: ModelCall,
        *,
        positions: Shaped[Array, "..."] | None = None,
        loss_terms: int | None = None,
        windows: Mapping[str, Window] | None = None,
        differentiate: bool = True,
        rows_key: Key[Array, ""] | None = None,
    ) -> Linearised:
        """Compute value, gradient and statistics, and a function for further backward passes.

        Args:
            traced: From ``traced``.
            emitter: What the taps emit into which slots.
            call: Where the program is linearized.
            positions: Which positions exist.
            loss_terms: Number of terms of a scalar loss.
            windows: For some layers, the iterations of a scan that their slots cover.
            differentiate: Whether to differentiate parameters too, or only slots.
            rows_key: Passed to every tap, if given.

        Raises:
            LostRowsError: ``positions`` cannot be followed to a layer.
        """
        objective, slots = self.objective, emitter.slots()
        params, batch, key, state = call
        # With no free parameter the backward pass ends at the lowest layer's slot. It then forms no
        # gradient of a parameter, which is half of a layer's backward products.
        free = partition(params)[0] if differentiate else {}
        zeros = {name: slot.sums for name, slot in slots.items()}
        data = batch.inputs if isinstance(objective, Objective) else batch
        masks = _masks(traced, positions)
        handler = tap(emitter, rows_key)

        def run(free: dict[str, Array], sums: dict[str, Any], *more: ArrayTree) -> ArrayTree:
            # Constants of a slot (eigenvectors, queries) go around the differentiation: a cotangent
            # of theirs would be as large as they are.
            filled = {n: dataclasses.replace(slots[n], sums=zero) for n, zero in sums.items()}
            args = with_leaves(params, free), filled, data, key, state, *more
            return traced.run(handler, *args, masks=masks, windows=windows)

        if traced.marks:
            return self._linearise_marked(traced, run, free, zeros)
        if not isinstance(objective, Objective):

            def share(*args: ArrayTree) -> tuple[Array, ArrayTree]:
                value, aux = run(*args)
                # A loss that is a mean over devices already, by its type, enters as it is.
                axes = axes_apart(self.axes, value)
                return value / num_devices(axes) if axes else value, aux

            differentiated = jax.value_and_grad(share, (0, 1), has_aux=True)
            (value, aux), (grads, emitted) = differentiated(free, zeros)
            axes = axes_apart(self.axes, value, batch)
            value, grads = sum_over_devices((value, grads), axes)
            # The loss does not show its number of terms; the caller gave it, and it may be too
            # large for 16 bits.
            terms = jnp.asarray(
                (loss_terms or 0) * num_devices(axes), statistics_dtype(value.dtype)
            )
            return Linearised(value, aux, grads, emitted, terms)

        outputs, vjp, aux = jax.vjp(run, free, zeros, has_aux=True)
        meeting = lambda: self.meeting(traced, "derivative")
        terms_of = objective.of_batch(outputs, batch, self.axes, meeting)

        def loss(outputs: ArrayTree) -> tuple[Array, Array]:
            return terms_of.loss(outputs, batch.targets, batch.mask)

        # The loss is differentiated apart from the model, so that other cotangents can be sent
        # through the same linearized model afterwards.
        value, loss_vjp, terms = jax.vjp(loss, outputs, has_aux=True)
        cotangents = loss_vjp(jnp.ones_like(value))[0]
        grads, emitted = vjp(cotangents)
        # The loss is this device's share of the mean over all devices.
        value, grads = sum_over_devices((value, grads), terms_of.axes)
        # Sampled labels and Fisher columns are computed from the outputs. They are constants to a
        # caller that differentiates the gradient.
        fixed = jax.lax.stop_gradient(outputs)

        def fisher_cotangents() -> ArrayTree:
            return terms_of.rescaled(fixed, cotangents, batch.mask)

        heads, scale, as_emitted = terms_of.heads(fixed, None, batch.mask), None, True
        if objective.num_outputs > 1 or heads[0].has_weights or heads[0].scale != 1.0:
            # With one output whose terms have no weights, the loss's cotangents are those of the
            # Fisher already, and no scale is needed.
            scale = common_scale(heads)
            as_emitted = scale is not None
        return Linearised(
            value,
            aux,
            grads,
            emitted,
            terms,
            fixed,
            lambda g: vjp(g)[1],
            terms_of,
            batch,
            None if as_emitted else fisher_cotangents,
            scale,
        )


def _no_handler(site: Site, operands: list[Any]) -> Any:
    raise AssertionError("no layer has a slot")


def _masks(traced: Traced, positions: Shaped[Array, "..."] | None) -> list[RowMask]:
    if positions is None:
        return []
    check_array("positions", positions)
    shapes = [x.shape for x in traced.out_shapes[: traced.num_outputs]]
    if positions.dtype != jnp.bool_ and not jnp.issubdtype(positions.dtype, jnp.floating):
        raise ValueError(
            f"positions: expected a bool array, or floating weights, got {positions.dtype}"
        )
    check_weights("positions", positions)
    number = positions.ndim
    for index, shape in enumerate(shapes):
        axes = traced.output_axes(index)
        # The last axis of the outputs holds the numbers of one term, so positions have fewer axes.
        if number < len(shape) and positions.shape == shape[:number] and axes is not None:
            return [RowMask(positions, axes[:number], complete=True)]
    leading = " or ".join(str(shape[:-1]) for shape in shapes)
    raise LostRowsError(
        f"positions have shape {positions.shape}, and the outputs' leading axes are "
        f"{leading}: name rows that never reach the output with jk.mark_rows(x, mask)"
    )
