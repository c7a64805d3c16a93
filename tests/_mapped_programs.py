"""Training on mapped axes: the same steps on one device, and on several under each kind of map."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkfac as jk

AXIS = "rows"
FORMS = ("pmap", "tracked", "untracked")  # shard_map with check_vma=True, and False


def model(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


OBJECTIVE = jk.Objective(model, jk.Gaussian())


def parameters() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    shapes = {"up": (3, 4), "bias": (4,), "down": (4, 2)}
    return {name: jnp.asarray(draw.normal(size=shape) / 2) for name, shape in shapes.items()}


def batch_of(terms: str) -> tuple[Any, ...]:
    """Sixteen rows; with a mask or weights, devices count different numbers of terms.

    Of two and of eight devices, the first keeps the fewest; of eight it keeps none.
    """
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(16, 3)), draw.normal(size=(16, 2))
    mask = np.arange(16) % 3 != 1
    mask[:5] = False
    beside = {"all": (), "mask": (mask,), "weights": (np.where(mask, 1 + np.arange(16.0), 0.0),)}
    return jax.tree.map(jnp.asarray, (x, y, *beside[terms]))


def over(form: str, devices: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(params, rows)`` on rows divided over devices; results of every device are stacked."""
    if form == "pmap":
        split = lambda x: x.reshape(devices, -1, *x.shape[1:])
        mapped = jax.pmap(fn, AXIS, in_axes=(None, 0), devices=jax.devices()[:devices])
        return lambda params, rows: mapped(params, jax.tree.map(split, rows))
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    vma, specs = form == "tracked", {"in_specs": (P(), P(AXIS))}
    if vma:  # JAX proves that results are equal on all devices
        whole = jax.jit(jax.shard_map(fn, mesh=mesh, **specs, out_specs=P()))
        return lambda *args: jax.tree.map(lambda x: x[None], whole(*args))
    each = lambda *args: jax.tree.map(lambda x: x[None], fn(*args))
    return jax.jit(jax.shard_map(each, mesh=mesh, **specs, out_specs=P(AXIS), check_vma=False))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "fixed": lambda like, **axes: jk.kfac(0.1, like=like, **axes),
    "adaptive": lambda like, **axes: jk.kfac(like=like, **axes),
    "kfe_adam": lambda like, **axes: jk.kfe_adam(1e-2, like=like, **axes),
}


def training(
    optimizer: str, fisher: str, steps: int, *, stats_axis: Any = None, tx_axis: Any = None
) -> Callable[..., Any]:
    """Some steps as a function of parameters and rows: parameters, and the mean losses.

    Args:
        optimizer: A key of ``OPTIMIZERS``.
        fisher: A Fisher type; labels of ``"mc"`` are given, beside the rows.
        steps: How many.
        stats_axis: ``axis_name=`` of the statistics.
        tx_axis: ``axis_name=`` of the optimizer.
    """
    stats = jk.value_grad_and_factors(OBJECTIVE, fisher=fisher, axis_name=stats_axis)

    def run(params: Any, rows: tuple[Any, Any]) -> Any:
        batch, labels = rows
        tx = OPTIMIZERS[optimizer](stats.factor_shapes(params, batch), axis_name=tx_axis)

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            key = jax.random.key(0)
            given = labels[None] if fisher == "mc" else None
            value, grads, factors = stats(params, batch, key, labels=given)
            extra = stats.adaptation(params, batch) if optimizer == "adaptive" else {}
            updates, state = tx.update(grads, state, params, factors=factors, **extra)
            if tx_axis is not None:
                value = jax.lax.pmean(value, AXIS)
            return (jax.tree.map(jnp.add, params, updates), state), value

        (params, _), values = jax.lax.scan(step, (params, tx.init(params)), length=steps)
        return params, values

    return run


def rows_of(terms: str) -> Any:
    batch = batch_of(terms)
    return batch, jnp.sin(3 * batch[1])


def largest_difference(found: Any, expected: Any) -> float:
    """Largest difference of stacked results from those of one device, over the largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)


def differences(devices: int, steps: int, cases: list[tuple[str, str, str, str]]) -> dict[str, Any]:
    """By ``form, optimizer, fisher, terms``: how far training on several devices is from one."""
    out = {}
    for form, optimizer, fisher, terms in cases:
        one = jax.jit(training(optimizer, fisher, steps))(parameters(), rows_of(terms))
        fn = training(optimizer, fisher, steps, stats_axis=AXIS)
        found = over(form, devices, fn)(parameters(), rows_of(terms))
        out[", ".join((form, optimizer, fisher, terms))] = largest_difference(found, one)
    return out
