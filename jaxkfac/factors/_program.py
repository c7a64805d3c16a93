"""A loss traced once and linearised with taps: what factors and EKFAC have in common."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxkfac._errors import LostRowsError
from jaxkfac.factors._objective import Objective, check_array, takes_key
from jaxkfac.factors._taps import Gathered, Slot, tap
from jaxkfac.interception import RowMask, Traced, Window, trace
from jaxkfac.linalg import statistics_dtype


class Linearised(NamedTuple):
    """A program at one point.

    Attributes:
        value: The mean loss.
        aux: What the model returned beside its outputs.
        grads: Gradient of the free leaves.
        emitted: Statistics of the gradient's own backward pass.
        terms: Number of loss terms.
        outputs: Outputs of the model; ``None`` for a scalar loss.
        vjp: From a cotangent of the outputs to the statistics of another backward pass of
            the same linearisation; ``None`` for a scalar loss.
    """

    value: Any
    aux: Any
    grads: list[Any]
    emitted: dict[str, Slot]
    terms: Any
    outputs: Any = None
    vjp: Any = None


class Program:
    """A loss and its traces, one for each set of shapes.

    Args:
        objective: An ``Objective``, or a scalar loss.
        finding: How layers are found; see ``trace``.
        cover: Whether an uncovered parameter raises.
        has_aux: Of a scalar loss.
    """

    def __init__(
        self,
        objective: Callable[..., Any],
        finding: Mapping[str, Any],
        *,
        cover: bool,
        has_aux: bool = False,
    ) -> None:
        self.objective: Any = objective
        self._finding, self._cover = finding, cover
        self._has_aux = has_aux
        self._traces: dict[Any, Traced] = {}

    def traced(self, params: PyTree, batch: Any, key: Any) -> Traced:
        """The trace for these shapes; one that closed over tracers is not kept.

        Raises:
            UncoveredParameterError: a parameter is covered by no layer, where that matters.
        """
        lead = isinstance(self.objective, Objective)
        args = (params, batch.inputs if lead else batch, key)
        leaves, tree = jax.tree.flatten(args)
        mesh = jax.sharding.get_abstract_mesh()
        known = (tree, tuple(jax.typeof(x) for x in leaves), mesh, jnp.zeros(()).dtype)
        if known in self._traces:
            return self._traces[known]
        traced = trace(self._forward, *args, examples_lead=lead, **self._finding)
        if self._cover:
            traced.table.raise_uncovered()
        if not traced.holds_tracers:
            self._traces[known] = traced
        return traced

    def _forward(self, params: PyTree, data: Any, key: Any) -> Any:
        if isinstance(self.objective, Objective):
            return self.objective.outputs(params, data, key)
        passes_key = takes_key(self.objective)
        out = self.objective(params, data, key=key) if passes_key else self.objective(params, data)
        value, aux = out if self._has_aux else (out, None)
        if jnp.shape(value) != ():
            raise ValueError(
                f"the loss has shape {jnp.shape(value)}, expected a scalar mean over rows; "
                "give a model and a likelihood as jk.Objective instead"
            )
        return value, aux

    def linearise(
        self,
        traced: Traced,
        gathered: Gathered,
        params: "Leaves",
        batch: Any,
        key: Any,
        *,
        positions: Any = None,
        loss_terms: int | None = None,
        windows: Mapping[str, Window] | None = None,
    ) -> Linearised:
        """Value, gradient, statistics, and a function for further ones.

        Args:
            traced: From ``traced``.
            gathered: What the taps emit into which slots.
            params: The parameters.
            batch: A ``Batch``, or whatever the scalar loss takes.
            key: The model's own.
            positions: Which positions exist.
            loss_terms: Number of terms of a scalar loss.
            windows: For some layers, the iterations of a scan that their slots stand for.

        Raises:
            LostRowsError: ``positions`` cannot be followed to a layer.
        """
        objective, slots = self.objective, gathered.slots()
        constants = {name: slot["constants"] for name, slot in slots.items() if "constants" in slot}
        wanted = {
            name: {k: v for k, v in slot.items() if k != "constants"}
            for name, slot in slots.items()
        }
        data = batch.inputs if isinstance(objective, Objective) else batch
        masks = _masks(traced, positions)

        def run(free: list[Any], slots: dict[str, Slot]) -> Any:
            held = {
                n: {**s, "constants": constants[n]} if n in constants else s
                for n, s in slots.items()
            }
            return traced.emit(
                tap(gathered),
                params.join(free),
                held,
                data,
                key,
                entries=gathered.entries,
                masks=masks,
                windows=windows,
            )

        if not isinstance(objective, Objective):
            (value, aux), (grads, emitted) = jax.value_and_grad(run, (0, 1), has_aux=True)(
                params.free, wanted
            )
            terms = jnp.asarray(loss_terms, statistics_dtype(value.dtype))
            return Linearised(value, aux, grads, emitted, terms)

        outputs, vjp, aux = jax.vjp(run, params.free, wanted, has_aux=True)

        def loss(outputs: Any) -> Any:
            return objective.loss(outputs, batch.targets, batch.mask)

        value, loss_vjp, terms = jax.vjp(loss, outputs, has_aux=True)
        grads, emitted = vjp(loss_vjp(jnp.ones_like(value))[0])
        fixed = jax.lax.stop_gradient(outputs)
        return Linearised(value, aux, grads, emitted, terms, fixed, lambda g: vjp(g)[1])


class Leaves:
    """A parameter tree split into leaves with a gradient and held-out ones.

    Integer leaves are held out; with ``differentiate=False``, all are.
    """

    def __init__(self, params: PyTree, *, differentiate: bool = True) -> None:
        self.tree = params
        leaves, self._structure = jax.tree.flatten(params)
        if not leaves:
            raise ValueError("params: the tree holds no arrays")
        self._leaves = leaves
        self._is_free = [
            differentiate and jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves
        ]
        self.free = [x for x, free in zip(leaves, self._is_free, strict=True) if free]

    def join(self, free: list[Any]) -> PyTree:
        """The tree with other free leaves."""
        rest = iter(free)
        leaves = [next(rest) if f else x for x, f in zip(self._leaves, self._is_free, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)

    def gradient(self, free: list[Any]) -> PyTree:
        """The tree of a gradient: zeros for what is held out."""
        rest = iter(free)
        zeros = [
            None
            if f
            else jnp.zeros(jnp.shape(x), x.dtype)
            if jnp.issubdtype(x.dtype, jnp.number)
            else x
            for x, f in zip(self._leaves, self._is_free, strict=True)
        ]
        leaves = [next(rest) if f else z for z, f in zip(zeros, self._is_free, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)


def _masks(traced: Traced, positions: Any) -> list[RowMask]:
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
