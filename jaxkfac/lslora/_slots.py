"""The slots of a bank: one axis more, after the stack, in every leaf of an adapter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._adapter import OWN_AXES, Adapter, Adapters, only_adapters
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._nonlinearity import Nonlinearity


def check_names(names: Sequence[str]) -> None:
    """Refuse names that cannot be part of a key or a folder.

    Raises:
        ValueError: naming it.
    """
    for name in names:
        if not name.isidentifier() or name in ("lora", "base_layer"):
            raise ValueError(
                f"adapter name {name!r}: expected an identifier (no path separator, no dot), and "
                "not 'lora' or 'base_layer', which PEFT's own keys contain"
            )


def check_layers(name: str, adapters: Adapters, first: Mapping[str, Any]) -> None:
    if whole := sorted(adapters.keys() - only_adapters(adapters).keys()):
        raise ValueError(f"adapter {name!r} holds whole parameters, which a bank cannot: {whole}")
    if different := sorted(adapters.keys() ^ first.keys()):
        raise ValueError(
            f"adapter {name!r} and the others of the bank adapt different layers: {different}"
        )


def scaling_of(config: Config | None, layer: str) -> float:
    return 1.0 if config is None else config.scaling(layer)


def each_leaf(fn: Callable[..., Any], *adapters: Adapter) -> Adapter:
    """``fn(axis of the slots counted from the end, leaf of each adapter)`` for every leaf."""
    new = {}
    for part, own in OWN_AXES.items():
        leaves = [getattr(adapter, part) for adapter in adapters]
        new[part] = None if leaves[0] is None else fn(leaves[0].ndim - own, *leaves)
    return Adapter(**new)


def pick_slot(held: Adapter, slot: Any) -> Adapter:
    """One slot; NaN where a traced index lies beyond the bank."""
    return each_leaf(lambda axis, x: jnp.take(x, slot, axis=axis - 1, mode="fill"), held)


def with_slot(held: Adapter, slot: int, part: Adapter) -> Adapter:
    def write(axis: int, x: Any, y: Any) -> Any:
        return x.at[(slice(None),) * (axis - 1) + (slot,)].set(y.astype(x.dtype))

    return each_leaf(write, held, part)


def padded(
    adapter: Adapter, rank: int, scaling: float, phi: Nonlinearity | None, where: str
) -> Adapter:
    """An adapter at a larger rank, its scaling in ``b``; ``phi`` is the bank's, if it has one."""
    extra = rank - adapter.a.shape[-1]
    lead = [(0, 0)] * (adapter.a.ndim - 2)
    out = adapter._replace(
        a=jnp.pad(adapter.a, [*lead, (0, 0), (0, extra)]),
        b=jnp.pad(adapter.b, [*lead, (0, extra), (0, 0)]) * scaling,
    )
    if adapter.coefficients is not None and phi is not None:
        phi.check(adapter.coefficients.shape, where)
    if phi is None or not adapter.is_linear:
        return out
    stack, wide = adapter.a.shape[:-2], statistics_dtype(adapter.a.dtype)
    return out._replace(
        coefficients=jnp.broadcast_to(jnp.asarray(phi.first(wide)), (*stack, len(phi.initial))),
        sigma=jnp.full(stack, jnp.inf, wide),
    )
