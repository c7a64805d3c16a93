"""A loss traced once and linearised with taps: what factors and EKFAC have in common."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree, Shaped

from jaxkfac._errors import LostRowsError
from jaxkfac.factors._objective import Objective, check_array, returned
from jaxkfac.factors._taps import Gathered, tap
from jaxkfac.interception import (
    RowMask,
    Slot,
    TraceCache,
    Traced,
    Window,
    partition,
    trace,
    with_leaves,
)
from jaxkfac.linalg import statistics_dtype


class Linearised(NamedTuple):
    """A program at one point.

    Attributes:
        value: The mean loss.
        aux: What the model returned beside its outputs: aux, the changed state, or both.
        grads: ``{path: gradient}`` of the leaves that have one.
        emitted: Statistics of the gradient's own backward pass.
        terms: Number of loss terms.
        outputs: Outputs of the model; ``None`` for a scalar loss.
        vjp: From a cotangent of the outputs to the statistics of another backward pass of
            the same linearisation; ``None`` for a scalar loss.
        traced: The program.
    """

    value: Any
    aux: Any
    grads: dict[str, Any]
    emitted: dict[str, Slot]
    terms: Any
    outputs: Any = None
    vjp: Any = None
    traced: Traced | None = None


class Program:
    """A loss and its traces, one for each set of shapes.

    Args:
        objective: An ``Objective``, or a scalar loss.
        finding: How layers are found; see ``trace``.
        cover: Whether an uncovered parameter raises.
        second_pass: Whether the caller may take a second pass over it instead.
        has_aux: Of a scalar loss.
    """

    def __init__(
        self,
        objective: Callable[..., Any],
        finding: Mapping[str, Any],
        *,
        cover: bool,
        second_pass: bool = False,
        has_aux: bool = False,
    ) -> None:
        self.objective: Any = objective
        self._finding, self._cover, self._second_pass = finding, cover, second_pass
        self._has_aux = has_aux
        self._traces: TraceCache[Traced] = TraceCache()

    def traced(
        self,
        params: PyTree,
        batch: PyTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None,
        state: PyTree | None = None,
    ) -> Traced:
        """The trace for these shapes.

        Raises:
            UncoveredParameterError: a parameter is covered by no layer, where that matters.
            ValueError: there are no parameters.
        """
        if not jax.tree.leaves(params):
            raise ValueError("params: the tree holds no arrays")
        lead = isinstance(self.objective, Objective)
        args = (params, batch.inputs if lead else batch, key, state)

        def make() -> Traced:
            traced = trace(self._forward, *args, examples_lead=lead, **self._finding)
            if self._cover and traced.table.problems:
                alone = self._second_pass and not traced.coupled_inputs
                traced.table.raise_uncovered(second_pass=alone)
            return traced

        return self._traces.get(args, make)

    def _forward(
        self, params: PyTree, data: PyTree, key: Key[Array, ""] | None, state: PyTree | None
    ) -> PyTree:
        if isinstance(self.objective, Objective):
            return self.objective.outputs(params, data, key, state)
        value, beside = returned(
            "the loss", self.objective, (params, data), key, state, self._has_aux
        )
        if jnp.shape(value) != ():
            raise ValueError(
                f"the loss has shape {jnp.shape(value)}, expected a scalar mean over rows; "
                "give a model and a likelihood as jk.Objective instead"
            )
        return value, beside

    def linearise(
        self,
        traced: Traced,
        gathered: Gathered,
        params: PyTree,
        batch: PyTree,
        key: Key[Array, ""] | None,
        state: PyTree | None = None,
        *,
        positions: Shaped[Array, "..."] | None = None,
        loss_terms: int | None = None,
        windows: Mapping[str, Window] | None = None,
        differentiate: bool = True,
    ) -> Linearised:
        """Value, gradient, statistics, and a function for further ones.

        Args:
            traced: From ``traced``.
            gathered: What the taps emit into which slots.
            params: The parameters.
            batch: A ``Batch``, or whatever the scalar loss takes.
            key: The model's own.
            state: What a call of the model changes, if anything.
            positions: Which positions exist.
            loss_terms: Number of terms of a scalar loss.
            windows: For some layers, the iterations of a scan that their slots stand for.
            differentiate: Whether the parameters get a gradient, or the slots alone.

        Raises:
            LostRowsError: ``positions`` cannot be followed to a layer.
        """
        objective, slots = self.objective, gathered.slots()
        free = partition(params)[0] if differentiate else {}
        constants = {name: slot["constants"] for name, slot in slots.items() if "constants" in slot}
        wanted = {
            name: {k: v for k, v in slot.items() if k != "constants"}
            for name, slot in slots.items()
        }
        data = batch.inputs if isinstance(objective, Objective) else batch
        masks = _masks(traced, positions)

        def run(free: dict[str, Array], slots: dict[str, Slot]) -> PyTree:
            held = {
                n: {**s, "constants": constants[n]} if n in constants else s
                for n, s in slots.items()
            }
            return traced.emit(
                tap(gathered),
                with_leaves(params, free),
                held,
                data,
                key,
                state,
                entries=gathered.entries,
                masks=masks,
                windows=windows,
            )

        if not isinstance(objective, Objective):
            (value, aux), (grads, emitted) = jax.value_and_grad(run, (0, 1), has_aux=True)(
                free, wanted
            )
            terms = jnp.asarray(loss_terms, statistics_dtype(value.dtype))
            return Linearised(value, aux, grads, emitted, terms)

        outputs, vjp, aux = jax.vjp(run, free, wanted, has_aux=True)

        def loss(outputs: Float[Array, "n *terms c"]) -> tuple[Array, Array]:
            return objective.loss(outputs, batch.targets, batch.mask)

        value, loss_vjp, terms = jax.vjp(loss, outputs, has_aux=True)
        grads, emitted = vjp(loss_vjp(jnp.ones_like(value))[0])
        fixed = jax.lax.stop_gradient(outputs)
        return Linearised(value, aux, grads, emitted, terms, fixed, lambda g: vjp(g)[1], traced)


def _masks(traced: Traced, positions: Shaped[Array, "..."] | None) -> list[RowMask]:
    if positions is None:
        return []
    check_array("positions", positions)
    axes, shape = traced.output_axes(), traced.out_shapes[0].shape
    if positions.dtype != jnp.bool_ or axes is None:
        raise ValueError(f"positions: expected a bool array, got {positions.dtype}")
    if positions.ndim >= len(shape) or positions.shape != shape[: positions.ndim]:
        raise LostRowsError(
            f"positions have shape {positions.shape}, and the outputs' leading axes are "
            f"{shape[:-1]}: name rows that never reach the output with jk.mark_rows(x, mask)"
        )
    return [RowMask(positions, axes[: positions.ndim], complete=True)]
