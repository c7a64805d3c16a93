"""States, factors and bases as ``flax.serialization`` writes them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from jaxkfac.curvature import Inverses, invert, precondition
from tests.written._kind import Kind
from tests.written._net import (
    OBJECTIVE,
    STATS,
    Readings,
    batch,
    of_bases,
    of_factors,
    of_tree,
    params,
    statistics,
    under,
)

_FILE = "bytes.msgpack"
IN_TURNS: Any = jk.value_grad_and_factors(OBJECTIVE, fisher="exact", collect=2)


def _of_flax(
    make: Callable[[], Any],
    target: Callable[[], Any],
    readings: Callable[[Any], Readings],
    go_on: Callable[[Any], Readings],
) -> Kind:
    def write(folder: Path) -> Any:
        value = make()
        (folder / _FILE).write_bytes(flax.serialization.to_bytes(value))
        return value

    def read(folder: Path) -> Any:
        value = flax.serialization.from_bytes(target(), (folder / _FILE).read_bytes())
        return jax.tree.map(jnp.asarray, value)

    return Kind(write, read, readings, go_on)


# ---------------- factors, bases, inverses


def _factors(number: int = 0) -> jk.Factors:
    return statistics(number)[2]


def _shapes() -> jk.Factors:
    return STATS.factor_shapes(params(), batch(0))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _average() -> jk.Factors:
    return jk.update_average(jk.update_average(_factors(0), _factors(1), 0.9), _factors(2), 0.9)


def _averaged_with_the_next(factors: jk.Factors) -> Readings:
    after = jk.update_average(factors, _factors(3), 0.9)
    return _few(of_factors(after) | under("bases", of_bases(jk.eigendecompose(after))))


def _bases() -> jk.Eigenbases:
    return jk.eigendecompose(_average(), placement="host")


def _measured() -> jk.Eigenbases:
    return jk.correct_eigenvalues(OBJECTIVE, _bases())(params(), batch(0))


def _gradients() -> Any:
    return statistics(3)[1]


def _bases_shapes() -> Any:
    return jax.eval_shape(lambda x: jk.eigendecompose(x), _shapes())


def _measured_shapes() -> Any:
    measure = lambda p, x: jk.correct_eigenvalues(OBJECTIVE, jk.eigendecompose(_zeros(x)))(
        p, batch(0)
    )
    return jax.eval_shape(measure, params(), _shapes())


def _preconditioned(bases: jk.Eigenbases) -> Readings:
    return of_tree(jk.natural_gradient(_gradients(), bases, damping=0.1), "step")


def _posterior(bases: jk.Eigenbases) -> Readings:
    posterior = jk.laplace(OBJECTIVE, params(), bases, num_examples=6, layers="head.*|left.*")
    prediction = posterior.predict(batch(1)[0])
    evidence = posterior.log_marginal_likelihood(batch(0))
    return _preconditioned(bases) | {
        "prediction": np.asarray(prediction),
        "evidence": np.asarray(evidence),
    }


def _inverses(packed: bool) -> Inverses:
    inverses = invert(_average(), damping=0.1, damping_mode="pi")
    return inverses.packed() if packed else inverses


def _inverse_shapes(packed: bool) -> Any:
    shapes = jax.eval_shape(lambda x: invert(x, damping=0.1, damping_mode="pi"), _shapes())
    return shapes.packed() if packed else shapes


def _of_inverses(inverses: Inverses) -> Readings:
    found: Readings = {}
    for layer in inverses.layers:
        if layer.is_diagonal:
            found[f"{layer.name}.diagonal"] = np.asarray(inverses.diagonals[layer.name])
            continue
        a, g = inverses.of(layer)
        found |= {f"{layer.name}.a": np.asarray(a), f"{layer.name}.g": np.asarray(g)}
    return found


def _divided(inverses: Inverses) -> Readings:
    return of_tree(precondition(_gradients(), inverses), "step")


# ---------------- states of optimizers


def _of_state(state: Any) -> Readings:
    """What the state of ``kfac`` shows."""
    found = of_factors(state.average) | of_tree(state.momentum, "momentum")
    for name in ("step", "skipped", "kept", "missed", "diverged"):
        found[name] = np.asarray(getattr(state, name))
    if isinstance(state.stacked_bases, Inverses):
        found |= under("inverses", _of_inverses(state.stacked_bases))
    else:
        found |= under("bases", of_bases(state.bases))
    if state.adaptation:
        adapted = state.adaptation._asdict().items()
        numbers = {k: np.asarray(v) for k, v in adapted if v is not None}
        found |= under("adaptation", numbers)
    return found


def _of_run(readings: Callable[[Any], Readings]) -> Callable[[Any], Readings]:
    """Readings of the parameters and of the state beside them."""
    return lambda run: of_tree(run["params"], "params") | readings(run["state"])


def _few(readings: Readings) -> Readings:
    """Without vectors, whose signs may differ, and without what is large."""
    return {k: v for k, v in readings.items() if "vectors" not in k and v.size < 1000}


def _of_optimizer(
    build: Callable[[jk.Factors], Any],
    readings: Callable[[Any], Readings] = _of_state,
    *,
    stats: Any = STATS,
    adapts: bool = False,
) -> Kind:
    """Parameters and state after three updates, and one more update of what was read."""

    def tx() -> Any:
        return build(stats.factor_shapes(params(), batch(0)))

    @functools.partial(jax.jit, static_argnums=2)
    def updated(run: Any, of_batch: Any, number: int) -> Any:
        options = {"step": number} if stats is IN_TURNS else {}
        _, grads, factors = stats(run["params"], of_batch, **options)
        if adapts:
            options = stats.adaptation(run["params"], of_batch)
        else:
            options = {}
        updates, state = tx().update(grads, run["state"], run["params"], factors=factors, **options)
        return {"params": optax.apply_updates(run["params"], updates), "state": state}

    def new() -> Any:
        return {"params": params(), "state": tx().init(params())}

    def make() -> Any:
        run = new()
        for number in range(3):
            run = updated(run, batch(number), number)
        return run

    def go_on(run: Any) -> Readings:
        return _few(_of_run(readings)(updated(run, batch(3), 3)))

    return _of_flax(make, new, _of_run(readings), go_on)


def _of_kfe_adam(state: Any) -> Readings:
    found = of_tree(state.first, "first") | under("bases", of_bases(state.stacked_bases))
    found |= {f"second/{name}": np.asarray(x) for name, x in state.second.items()}
    names = ("step", "skipped", "kept", "missed", "diverged")
    counts = {name: np.asarray(getattr(state, name)) for name in names}
    return found | counts | under("average", of_factors(state.stacked_average))


def _of_groups(state: Any) -> Readings:
    """The state of ``multi_steps`` in the middle of a group."""
    sums = state.accumulation.acc_grads
    found = of_tree(sums["grads"], "sum") | {"terms of the sum": np.asarray(sums["terms"])}
    found |= under("factors", of_factors(sums["factors"]))
    for name in ("mini_step", "gradient_step"):
        found[name] = np.asarray(getattr(state.accumulation, name))
    counts = {name: np.asarray(getattr(state, name)) for name in ("skipped", "empty")}
    return found | counts | under("inner", _of_state(state.inner))


def _of_object(state: Any) -> Readings:
    """The state of ``jk.Optimizer``."""
    counts = {name: np.asarray(getattr(state, name)) for name in ("step", "key", "probabilities")}
    return counts | under("inner", _of_state(state.inner))


def _kind_of_object() -> Kind:
    optimizer = jk.Optimizer(OBJECTIVE, jk.kfac(packed=True, refresh_every=2))
    step = jax.jit(optimizer.step)

    def new() -> Any:
        return {"params": params(), "state": optimizer.init(params(), batch(0), jax.random.key(3))}

    def updated(run: Any, number: int) -> Any:
        moved, state, _ = step(run["params"], run["state"], batch(number))
        return {"params": moved, "state": state}

    return _of_flax(
        lambda: updated(updated(new(), 0), 1),
        new,
        _of_run(_of_object),
        lambda run: _few(_of_run(_of_object)(updated(run, 2))),
    )


FIXED = {"damping": 0.1, "decay": 0.9, "refresh_every": 2, "momentum": 0.9, "norm_constraint": 1e-2}

STATES = {
    "factors": _of_flax(_factors, lambda: _zeros(_shapes()), of_factors, _averaged_with_the_next),
    "factors-packed": _of_flax(
        lambda: _factors().packed(),
        lambda: _zeros(_shapes().packed()),
        of_factors,
        _averaged_with_the_next,
    ),
    "average": _of_flax(_average, lambda: _zeros(_shapes()), of_factors, _averaged_with_the_next),
    "bases": _of_flax(_bases, lambda: _zeros(_bases_shapes()), of_bases, _preconditioned),
    # A Laplace posterior has no file of its own: it is built anew from what these hold.
    "bases-measured": _of_flax(_measured, lambda: _zeros(_measured_shapes()), of_bases, _posterior),
    "inverses": _of_flax(
        lambda: _inverses(False), lambda: _zeros(_inverse_shapes(False)), _of_inverses, _divided
    ),
    "inverses-packed": _of_flax(
        lambda: _inverses(True), lambda: _zeros(_inverse_shapes(True)), _of_inverses, _divided
    ),
    "kfac": _of_optimizer(
        lambda like: jk.kfac(0.1, like=like, packed=False, inverse="eigh", **FIXED)
    ),
    "kfac-packed": _of_optimizer(
        lambda like: jk.kfac(0.1, like=like, packed=True, damping_mode="pi", **FIXED)
    ),
    "kfac-adaptive": _of_optimizer(
        lambda like: jk.kfac(like=like, packed=True, refresh_every=2), adapts=True
    ),
    "kfac-in-turns": _of_optimizer(
        lambda like: jk.kfac(0.1, like=like, packed=True, damping_mode="pi", **FIXED),
        stats=IN_TURNS,
    ),
    "kfe-adam": _of_optimizer(
        lambda like: jk.kfe_adam(0.01, like=like, refresh_every=2), _of_kfe_adam
    ),
    "multi-steps": _of_optimizer(
        lambda like: jk.multi_steps(
            jk.kfac(0.1, like=like, packed=True, damping_mode="pi", **FIXED), 2
        ),
        _of_groups,
    ),
    "optimizer": _kind_of_object(),
}
