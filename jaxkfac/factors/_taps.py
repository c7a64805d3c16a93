"""Taps: operations whose backward pass emits curvature statistics.

A tap computes what the original equation computes. Its forward rule never touches its slot,
so the slot is no residual and remat policies see the original operation. Its backward rule
returns the original cotangents and, as the cotangent of the slot, the statistics. JAX adds up the
cotangents of a variable over its readers, stacks them along a scanned axis, and sums them over
devices. So the statistics are added, stacked and summed too, without any code for it.

Only the ``sums`` of a slot are differentiated. Its ``constants`` (an eigenbasis) go to the code
that computes the statistics, in ``LayerVjp``.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key

from jaxkfac._jaxpr_compat import automatic, cast_varying
from jaxkfac.interception import Handler, LayerVjp, Site, Use
from jaxkfac.interception.values import Slot

# True for rows that exist, or their weights; None if all do.
Weights = Bool[Array, "..."] | Float[Array, "..."] | None


@runtime_checkable
class ArrayType(Protocol):
    """An array, or the shape and dtype of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@runtime_checkable
class Emitter(Protocol):
    """What the taps of a program emit: the slots of its layers, and the statistics in them."""

    def slots(self) -> dict[str, Slot]:
        """``{layer: slot}``; the cotangents of ``sums`` are the statistics."""
        ...

    def comes_first(self, use: Use) -> bool:
        """Whether the statistics of a use must be complete before its cotangent goes on."""
        ...

    def signature(self, site: Site, use: Use) -> Hashable:
        """What the tap of a use depends on besides its operands.

        Taps with equal signatures are traced once and lowered to one function. A tap whose
        signature is ``None`` is traced by itself.
        """
        ...

    def emit(self, vjp: LayerVjp, like: Any) -> Any:
        """Compute the statistics of one use, in its backward pass.

        Args:
            vjp: The use, its operands, its cotangent and the constants of its slot.
            like: Shapes and dtypes of the slot's ``sums``.
        """
        ...


class _Saved(NamedTuple):
    """What the backward rule of a tap keeps besides the operands, for each use.

    Attributes:
        rows: Which rows exist, or their weights; ``None`` for all.
        active: Whether statistics are needed; ``None`` for always.
        constants: The slot's constants.
        derivative: The slot's derivative.
        key: The key that every tap receives.
    """

    rows: Weights
    active: Bool[Array, ""] | None
    constants: Any
    derivative: Array | None
    key: Key[Array, ""] | None


def tap(emitter: Emitter, key: Key[Array, ""] | None = None) -> Handler:
    """A handler that emits statistics.

    Args:
        emitter: What the taps emit into which slots.
        key: A random key that every tap receives.
    """
    shared: dict[Hashable, Callable[..., Array]] = {}

    def handler(site: Site, operands: list[Any]) -> Any:
        bare, sums = site.without_values(), [slot.sums for slot in site.slots]
        saved = [
            _Saved(rows, active, slot.constants, slot.derivative, key)
            for rows, active, slot in zip(site.rows, site.active, site.slots, strict=True)
        ]
        if site.uses[0].kind.inserts:
            # The tap is on the broadcast: its cotangent has a row for each position, while the
            # parameter's own cotangent is already their sum.
            operands = list(operands)
            for k, use in enumerate(site.uses):
                parameter = operands[use.at.operand]
                shape = _shape_inside(site, parameter)
                op = _tapped(_broadcast_to(shape), emitter, bare, [use], [sums[k]], shared)
                operands[use.at.operand] = op([parameter], [saved[k]])
            return site.bind(*operands)
        return _tapped(bare.bind, emitter, bare, site.uses, sums, shared)(operands, saved)

    return handler


def _tapped(
    fn: Callable[..., Array],
    emitter: Emitter,
    site: Site,
    uses: list[Use],
    sums: list[Any],
    shared: dict[Hashable, Callable[..., Array]],
) -> Callable[[list[Any], list[_Saved]], Array]:
    likes = jax.tree.map(jax.typeof, sums)  # a backward rule must not close over traced arrays
    signatures = tuple(emitter.signature(site, use) for use in uses)
    if None in signatures:
        op = _operation(fn, emitter, site, uses, likes)
    else:
        types, tree = jax.tree.flatten(likes)
        signature_key = signatures, tree, tuple(types)
        if signature_key not in shared:
            shared[signature_key] = jax.jit(_operation(fn, emitter, site, uses, likes))
        op = shared[signature_key]

    def run(operands: list[Any], saved: list[_Saved]) -> Array:
        operands = jax.tree.map(jnp.asarray, operands)  # a constant may be NumPy's
        # Inside ``shard_map`` a slot varies as the data does; the transpose of that cast sums its
        # cotangent over the devices.
        varying = sums
        for operand in operands:
            varying = jax.tree.map(lambda s, like=operand: cast_varying(s, like), varying)
        return op(operands, saved, varying)

    return run


def _operation(
    fn: Callable[..., Array], emitter: Emitter, site: Site, uses: list[Use], likes: list[Any]
) -> Callable[..., Array]:
    """``fn`` on operands, what is saved and sums, with the backward rule of a tap."""

    @jax.custom_vjp
    def op(operands: list[Array], saved: list[_Saved], sums: list[Any]) -> Array:
        return fn(*operands)

    def forward(
        operands: list[Array], saved: list[_Saved], sums: list[Any]
    ) -> tuple[Array, tuple[list[Array], list[_Saved]]]:
        return fn(*operands), (operands, saved)

    def backward(
        residuals: tuple[list[Array], list[_Saved]], cotangent: Array
    ) -> tuple[list[Array | np.ndarray], None, list[Any]]:
        operands, saved = residuals

        def typed(x: Array, of: ArrayType) -> Array:
            return cast_varying(x.astype(of.dtype), cotangent)

        def statistics(use: Use, beside: _Saved, like: Any) -> Any:
            def emitted() -> Any:
                def emit(operands: list[Array], cotangent: Array, beside: _Saved) -> Any:
                    rows, _, *others = beside
                    vjp = LayerVjp(site, use, operands, cotangent, rows, None, *others)
                    if rows is not None and rows.dtype != jnp.bool_:
                        vjp = dataclasses.replace(vjp, weights=rows != 0, input_weights=rows)
                    return emitter.emit(vjp, like)

                inside = beside._replace(active=None)
                out = automatic(emit, like)(operands, cotangent, inside)
                return jax.tree.map(typed, out, like)

            def nothing() -> Any:
                return jax.tree.map(lambda s: typed(jnp.zeros(s.shape, s.dtype), s), like)

            if beside.active is None:
                return emitted()
            return jax.lax.cond(beside.active, emitted, nothing)

        out = list(map(statistics, uses, saved, likes))
        if any(map(emitter.comes_first, uses)):
            # A scheduler puts off what frees no memory at once. Without the barrier it would run
            # these products last, and so keep the cotangent that they read (for logits: rows x
            # vocabulary) alive to the end of the backward pass.
            out, cotangent = jax.lax.optimization_barrier((out, cotangent))
        cotangents = jax.vjp(fn, *operands)[1](cotangent)
        return list(cotangents), None, out

    op.defvjp(forward, backward)
    return op


def _shape_inside(site: Site, parameter: ArrayType) -> tuple[int, ...]:
    """The shape in which a parameter is added to data, or concatenated with it."""
    spread = site.eqn.primitive.name in ("add", "sub", "add_any")
    return site.eqn.outvars[0].aval.shape if spread else parameter.shape


def _broadcast_to(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return lambda x: jnp.broadcast_to(x, shape) if x.shape != shape else x
