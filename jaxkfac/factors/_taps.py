"""Taps: operations whose backward pass emits curvature statistics.

A tap computes what the original equation computes. Its forward rule never touches its slot,
so the slot is no residual and remat policies see the original operation; its backward rule
returns the original cotangents and, as the cotangent of the slot, the statistics. Cotangents
of a variable add up over its readers, stack along a scanned axis, and are summed over
devices, so the statistics do, without a line of code for it.

A slot is a dictionary of arrays. What lies under ``"constants"`` (an eigenbasis) is
not differentiated: it is handed to whoever computes the statistics.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxkfac.interception import Entries, Handler, Site, Slot, Use, automatic, cast_varying

Weights = Bool[Array, "..."] | None  # which rows exist
Active = Bool[Array, ""] | None  # whether statistics are wanted


@runtime_checkable
class ArrayType(Protocol):
    """An array, or the shape and dtype of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@runtime_checkable
class Emitter(Protocol):
    """What the taps of a program emit: the slots of its layers, and what goes into them."""

    @property
    def entries(self) -> Entries:
        """How the entries of the slots follow their parameter."""
        ...

    def slots(self) -> dict[str, Slot]:
        """``{layer: zeros}``: their cotangents are the statistics."""
        ...

    def comes_first(self, use: Use) -> bool:
        """Whether the statistics of a use are whole before its cotangent is propagated."""
        ...

    def signature(self, site: Site, use: Use) -> Hashable:
        """What the tap of a use depends on beside its operands.

        Taps that agree in it are traced once, and lowered to one function. ``None``: this one
        is traced by itself.
        """
        ...

    def emit(
        self,
        site: Site,
        use: Use,
        like: Slot,
        operands: list[Any],
        cotangent: Float[Array, "..."],
        weights: Bool[Array, "..."] | None,
        constants: Slot | None,
    ) -> Slot:
        """The statistics of one use, in its backward pass.

        Args:
            site: The equation; it holds no tracers.
            use: The use.
            like: Shapes and dtypes of the slot.
            operands: Operands of the equation; of an insertion, the parameter alone.
            cotangent: Cotangent of the result; of an insertion, of the parameter as it was
                broadcast.
            weights: Which rows exist, with the axes of ``use.rows``.
            constants: What the slot held under ``"constants"``, and what every tap is handed.
        """
        ...


def tap(emitter: Emitter, constants: Slot | None = None) -> Handler:
    """The handler that emits statistics.

    Args:
        emitter: What the taps emit into which slots.
        constants: Arrays that every tap is handed, beside those in its slot.
    """
    shared: dict[Hashable, Callable[..., Array]] = {}

    def handler(site: Site, operands: list[Any]) -> Any:
        bare = site.without_values()
        slots = [
            {**slot, "constants": {**constants, **slot.get("constants", {})}} if constants else slot
            for slot in site.slots
        ]
        if site.uses[0].kind.inserts:
            operands = list(operands)
            for k, use in enumerate(site.uses):
                parameter = operands[use.operand]
                shape = _shape_inside(site, parameter)
                op = _tapped(_broadcast_to(shape), emitter, bare, [use], [slots[k]], shared)
                operands[use.operand] = op([parameter], [site.rows[k]], [site.active[k]])
            return site.bind(*operands)
        op = _tapped(bare.bind, emitter, bare, site.uses, slots, shared)
        return op(operands, site.rows, site.active)

    return handler


def _tapped(
    fn: Callable[..., Array],
    emitter: Emitter,
    site: Site,
    uses: list[Use],
    slots: list[Slot],
    shared: dict[Hashable, Callable[..., Array]],
) -> Callable[[list[Any], list[Weights], list[Active]], Array]:
    constants = [slot.get("constants") for slot in slots]
    slots = [{k: v for k, v in slot.items() if k != "constants"} for slot in slots]
    likes = jax.tree.map(jax.typeof, slots)  # a backward rule may close over nothing but types
    signatures = tuple(emitter.signature(site, use) for use in uses)
    if None in signatures:
        op = _operation(fn, emitter, site, uses, likes)
    else:
        types, tree = jax.tree.flatten(likes)
        known = signatures, tree, tuple(types)
        if known not in shared:
            shared[known] = jax.jit(_operation(fn, emitter, site, uses, likes))
        op = shared[known]

    def run(operands: list[Any], rows: list[Weights], active: list[Active]) -> Array:
        operands = jax.tree.map(jnp.asarray, operands)  # a constant may be NumPy's
        data = operands[1 - uses[0].operand] if len(operands) > 1 else operands[0]
        varying = jax.tree.map(lambda s: cast_varying(s, data), slots)
        return op(operands, rows, active, constants, varying)

    return run


def _operation(
    fn: Callable[..., Array], emitter: Emitter, site: Site, uses: list[Use], likes: list[Slot]
) -> Callable[..., Array]:
    """``fn`` of operands, rows, active, constants and slots, with the backward rule of a tap."""

    @jax.custom_vjp
    def op(
        operands: list[Array],
        rows: list[Weights],
        active: list[Active],
        constants: list[Slot | None],
        slots: list[Slot],
    ) -> Array:
        return fn(*operands)

    def forward(
        operands: list[Array],
        rows: list[Weights],
        active: list[Active],
        constants: list[Slot | None],
        slots: list[Slot],
    ) -> tuple[Array, tuple[list[Array], list[Weights], list[Active], list[Slot | None]]]:
        return fn(*operands), (operands, rows, active, constants)

    def backward(
        saved: tuple[list[Array], list[Weights], list[Active], list[Slot | None]],
        cotangent: Array,
    ) -> tuple[list[Array | np.ndarray], None, None, None, list[Slot]]:
        operands, rows, active, constants = saved

        def typed(x: Array, of: ArrayType) -> Array:
            return cast_varying(x.astype(of.dtype), cotangent)

        def statistics(k: int) -> Slot:
            like = likes[k]

            def emitted() -> Slot:
                emit = functools.partial(emitter.emit, site, uses[k], like)
                out = automatic(emit, like)(operands, cotangent, rows[k], constants[k])
                return jax.tree.map(typed, out, like)

            def nothing() -> Slot:
                return jax.tree.map(lambda s: typed(jnp.zeros(s.shape, s.dtype), s), like)

            there = active[k]
            return emitted() if there is None else jax.lax.cond(there, emitted, nothing)

        out = [statistics(k) for k in range(len(uses))]
        if any(map(emitter.comes_first, uses)):
            # A scheduler puts off what frees nothing at once: these products last, and so the
            # cotangent that they read is kept (of logits: rows x vocabulary) all the way back.
            out, cotangent = jax.lax.optimization_barrier((out, cotangent))
        cotangents = jax.vjp(fn, *operands)[1](cotangent)
        return list(cotangents), None, None, None, out

    op.defvjp(forward, backward)
    return op


def _shape_inside(site: Site, parameter: ArrayType) -> tuple[int, ...]:
    """The shape in which a parameter is added to data, or put beside it."""
    spread = site.eqn.primitive.name in ("add", "sub", "add_any")
    return site.eqn.outvars[0].aval.shape if spread else parameter.shape


def _broadcast_to(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return lambda x: jnp.broadcast_to(x, shape) if x.shape != shape else x
