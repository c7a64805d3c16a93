"""What each of several processes runs: ``python -m tests._process_programs NAME PORT COUNT RANK``.

A process prints one line of JSON, and ends with an error's message on standard error.
"""

import functools
import json
import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk

LAYERS = {"wide": (7, 12), "blocks": (3, 12, 12), "out": (12, 3)}


def model(p, x, unroll=False):
    h = jnp.tanh(x @ p["wide"])
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["blocks"], unroll=unroll)
    return h @ p["out"] * p["scale"]


OBJECTIVE = jk.Objective(model, jk.Categorical())
# XLA's CPU runtime does not order what processes exchange inside a loop before what comes after.
UNROLLED = jk.Objective(functools.partial(model, unroll=True), jk.Categorical())


def parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    params = {name: draw.normal(size=shape) / 3 for name, shape in LAYERS.items()}
    return {**params, "scale": np.ones(3)}


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(100 + step)
    return draw.normal(size=(8, 7)), draw.integers(0, 3, 8)


class World:
    """A mesh over every device of every process, or over one device where there is one process."""

    def __init__(self) -> None:
        self.mesh = jax.make_mesh(
            (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        )

    def put(self, tree: Any, *axes: Any) -> Any:
        where = NamedSharding(self.mesh, P(*axes))
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, where, lambda i, x=x: x[i]), tree
        )

    def stats(self, sharded: bool = False) -> Any:
        stats = jk.value_grad_and_factors(OBJECTIVE)
        whole = NamedSharding(self.mesh, P())
        if not sharded:
            return jax.jit(stats, out_shardings=whole)
        like = stats.factor_shapes(parameters(), batch_of(0))
        count = jax.device_count()

        def rows(x: Any) -> Any:
            split = x.ndim >= 2 and x.shape[-1] % count == 0
            return NamedSharding(self.mesh, P(*[None] * (x.ndim - 1), "data") if split else P())

        factors = jax.tree.map(rows, like)
        return jax.jit(lambda p, b: stats(p, b)[2], out_shardings=factors)


def read(tree: Any) -> dict[str, list[float]]:
    """What this process has of arrays that are whole in each."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    here = {
        jax.tree_util.keystr(path): np.asarray(leaf).ravel().tolist()
        for path, leaf in flat
        if isinstance(leaf, jax.Array | np.ndarray)
    }
    return here


def natural(bases: Any, grads: Any) -> Any:
    return jk.natural_gradient(grads, bases, damping=1e-2)


def host(world: World) -> dict[str, Any]:
    """Averages, refreshes, a budget, a saved service and single decompositions."""
    from jaxkfac.curvature.host import _decompose

    out: dict[str, Any] = {}
    solved: list[int] = []
    on_host = _decompose.eigh_on_host

    def counted(matrix, **options):
        solved.append(len(matrix) ** 3)
        return on_host(matrix, **options)

    _decompose.eigh_on_host = counted
    params = world.put(parameters())
    for name, sharded in (("replicated", False), ("sharded", True)):
        stats, plain = world.stats(sharded), world.stats()
        with jk.HostCurvature(decay=0.9, refresh_every=2, lag=1) as service:
            for step in range(5):
                batch = world.put(batch_of(step), "data")
                _, grads, factors = plain(params, batch)
                service.push(stats(params, batch) if sharded else factors, step)
                bases = service.bases(step)
            out[name] = read(jax.jit(natural)(bases, grads))
            out[f"{name} average"] = read(service.average().g_sums)
            if not sharded:
                out["cubes"] = list(solved)
                path = sys.argv[5] + f"/{jax.process_index()}"
                service.save(path)
        if not sharded:
            with jk.HostCurvature.load(path) as again:
                again.push(factors, 7)
                out["loaded"] = read(jax.jit(natural)(again.bases(8), grads))
    for placement in ("host", "auto"):
        bases = jk.eigendecompose(factors, placement=placement)
        out[placement] = read(jax.jit(natural)(bases, grads))
    sink = jk.HostCurvature(decay=0.9, refresh_every=2, lag=1)
    whole = jk.value_grad_and_factors(OBJECTIVE, max_factor_bytes=4000)
    _, grads, budgeted = whole(params, world.put(batch_of(4), "data"))
    out["budgeted"] = read(budgeted.g_sums)
    sink.push(budgeted, 0)
    sink.close()
    return out


def kfac(world: World) -> dict[str, Any]:
    """Three steps in the graph; with refreshes that are divided, and with all that is kept."""
    pi = {"damping_mode": "pi"}
    return {
        "whole": _trained(world),
        "divided": _trained(world, distribute="data"),
        "divided, pi": _trained(world, distribute="data", **pi),
        "sharded": _trained(world, sharded=True),
        "sharded, pi": _trained(world, sharded=True, **pi),
        "sharded and divided": _trained(world, sharded=True, distribute="data"),
        "adaptive": _trained(world, adaptive=True),
        "adaptive, divided": _trained(world, adaptive=True, distribute="data", **pi),
        "adaptive, sharded": _trained(world, adaptive=True, sharded=True),
    }


def _trained(
    world: World, *, sharded: bool = False, adaptive: bool = False, **options: Any
) -> dict[str, Any]:
    objective = UNROLLED if sharded else OBJECTIVE  # only divided blocks are gathered in the loop
    stats = jk.value_grad_and_factors(objective)
    like = stats.factor_shapes(parameters(), batch_of(0))
    fixed: Any = {"learning_rate": 0.1, "damping": 1e-2, "norm_constraint": 1e-2}
    rule = jk.LevenbergMarquardt(initial=1e-2, every=2)
    chosen: Any = {"damping": rule, "damping_mode": "exact"}
    numbers = chosen if adaptive else fixed
    tx = jk.kfac(like=like, refresh_every=2, **(numbers | options))
    whole = NamedSharding(world.mesh, P())

    def step(params, state, batch):
        value, grads, factors = stats(params, batch)
        model: Any = {}
        if adaptive:
            loss = functools.partial(objective, batch=batch)
            curvature = jk.operators.ggn(objective, params, batch)
            model = {"value": value, "value_fn": loss, "curvature": curvature}
        updates, state = tx.update(grads, state, params, factors=factors, **model)
        return jax.tree.map(jnp.add, params, updates), state, value

    params = parameters()
    held = params, jax.eval_shape(tx.init, params)
    places = jax.tree.map(lambda _: whole, held)
    if sharded:
        places = jk.memory.divided_shardings(held, world.mesh, "data")
    step = jax.jit(step, out_shardings=(*places, whole))
    with jax.set_mesh(world.mesh):
        params = jax.jit(lambda x: x, out_shardings=places[0])(world.put(params))
        state = jax.jit(tx.init, out_shardings=places[1])(params)
        for i in range(3):
            params, state, _ = step(params, state, world.put(batch_of(i), "data"))
        return read(jax.jit(lambda x: x, out_shardings=whole)(params))


def not_finite(world: World) -> dict[str, Any]:
    """A factor with NaN, which one process decomposes: both say so."""
    _, _, factors = world.stats()(world.put(parameters()), world.put(batch_of(0), "data"))
    factors = jax.tree.map(lambda x: x * jnp.nan, factors)
    try:
        jk.eigendecompose(factors, placement="host")
    except jk.NonFiniteFactorError as error:
        return {"error": str(error)}
    return {}


def closed_over(world: World) -> dict[str, Any]:
    """An adapter beside a base that the model closes over, divided over the processes."""
    base = world.put(parameters()["wide"][:6], "data")
    adapter = {"down": jnp.ones((6, 2)), "up": jnp.zeros((2, 12))}
    apply_fn = lambda p, x: x @ base + x @ p["down"] @ p["up"]
    batch = jnp.ones((4, 6)), jnp.ones((4, 12))
    table = jk.find_layers(jk.Objective(apply_fn, jk.Gaussian()), adapter, batch)
    return {"layers": list(table), "uncovered": len(table.uncovered)}


def disagree(world: World) -> dict[str, Any]:
    """One process has another condition number."""
    _, _, factors = world.stats()(world.put(parameters()), world.put(batch_of(0), "data"))
    service = jk.HostCurvature(lag=0, max_condition=1e3 * (1 + jax.process_index()))
    service.push(factors, 0)
    try:
        service.bases(0)
    except jk.ProcessesDisagreeError as error:
        return {"error": str(error)}
    return {}


def first_batches(world: World) -> dict[str, Any]:
    """What is said of first batches that are equal, of other values, and of another length."""
    rank = jax.process_index()
    rows = np.arange(24.0).reshape(8, 3)
    tried = {
        "the same": (rows, False),
        "other values": (rows + rank, False),
        "rows of its own": (rows + rank, True),
        "a row more": (np.ones((8 + rank, 3)), True),
    }
    said = {}
    for name, (batch, local) in tried.items():
        try:
            jk.check_same_batch({"x": batch, "y": np.zeros(2, int)}, local=local)
            said[name] = ""
        except jk.ProcessesDisagreeError as error:
            said[name] = str(error)
    return said


def silent(world: World) -> dict[str, Any]:
    """One process has no data: it pushes nothing and asks for nothing."""
    _, _, factors = world.stats()(world.put(parameters()), world.put(batch_of(0), "data"))
    if jax.process_index() == 1:
        time.sleep(300)
    service = jk.HostCurvature(lag=0, timeout=3)
    service.push(factors, 0)
    service.bases(0)
    return {}


def killed(world: World) -> dict[str, Any]:
    """One process is killed before the second refresh."""
    stats, params = world.stats(), world.put(parameters())
    with jk.HostCurvature(refresh_every=1, lag=0) as service:
        for step in range(1000):
            _, _, factors = stats(params, world.put(batch_of(step % 3), "data"))
            service.push(factors, step)
            if step == 3 and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            service.bases(step)
    return {}


def main() -> None:
    name, port, count, rank = sys.argv[1], *map(int, sys.argv[2:5])
    # JAX ends every process where one is held up for about this many seconds, busy or gone.
    patience = 10 if name in ("killed", "silent") else 100
    jax.config.update("jax_enable_x64", True)
    if count > 1:
        jax.distributed.initialize(
            f"localhost:{port}",
            count,
            rank,
            heartbeat_timeout_seconds=patience,
            shutdown_timeout_seconds=patience,
        )
    print(json.dumps(globals()[name](World())), flush=True)
    if name == "silent":
        os._exit(0)


if __name__ == "__main__":
    main()
