"""What a process with eight devices runs: ``python -m tests._device_programs NAME``.

It prints one line of JSON.
"""

import functools
import itertools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkfac as jk
from tests._mapped_programs import FORMS, OPTIMIZERS, differences

SIDES = {"up": (16, 24), "blocks": (3, 24, 24), "down": (24, 8)}


def _product(x: Any, w: Any, names: bool) -> Any:
    """A product over an axis that may be split says how its result is."""
    mesh = jax.typeof(x).sharding.mesh
    if not (names and mesh.explicit_axes):
        return x @ w
    return jnp.einsum("ni,io->no", x, w, out_sharding=P("data"))


def model(p: Any, x: Any, *, split: bool = False) -> Any:
    h = jnp.tanh(_product(x, p["up"], split))
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(_product(h, w, split)), None), h, p["blocks"])
    return _product(h, p["down"], split) + p["bias"]


def parameters() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    params = {name: draw.normal(size=shape) / 5 for name, shape in SIDES.items()}
    return {**params, "bias": draw.normal(size=8)}


def batch_of(step: int) -> Any:
    draw = np.random.default_rng(100 + step)
    return draw.normal(size=(16, 16)), draw.integers(0, 8, 16)


def _text(x: Any) -> list[float]:
    return np.asarray(x).ravel().tolist()


def training(layout: str, kind: str, **options: Any) -> dict[str, Any]:
    """Four steps; parameters at the end, and the shapes of all arrays, whole and on a device.

    Args:
        layout: ``"one"`` device, ``"data"`` parallel or ``"full"``y sharded.
        kind: ``"auto"`` or ``"explicit"`` axes.
        options: Of ``jk.kfac``.
    """
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((1 if layout == "one" else 8,), ("data",), axis_types=types)
    full, explicit = layout == "full", kind == "explicit"
    apply_fn = functools.partial(model, split=full and explicit)
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))
    like = stats.factor_shapes(parameters(), batch_of(0))
    options = {"damping": 1e-2, "refresh_every": 2, "norm_constraint": 1e-2} | options
    tx = jk.kfac(0.1, like=like, **options)

    def placed(tree: Any) -> Any:
        if full:
            return jk.memory.divided_shardings(tree, mesh, "data")
        return jax.tree.map(lambda x: NamedSharding(mesh, P()), tree)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads, factors = stats(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return jax.tree.map(jnp.add, params, updates), state, value

    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), placed(parameters()))
        shapes = jax.eval_shape(tx.init, parameters())
        kept = placed(shapes)
        state = jax.device_put(jax.jit(tx.init)(parameters()), kept)
        step = jax.jit(step, out_shardings=(placed(params), kept, NamedSharding(mesh, P())))
        for i in range(4):
            batch = jax.device_put(batch_of(i), NamedSharding(mesh, P("data")))
            params, state, value = step(params, state, batch)
    end = {name: _text(x) for name, x in params.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path((params, state))
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    held = {
        name: [x.shape, x.sharding.shard_shape(x.shape)]
        for name, (_, x) in zip(names, leaves, strict=True)
    }
    return {"params": end, "loss": float(value), "held": held}


def layouts() -> dict[str, Any]:
    out = {"one": training("one", "auto")}
    for kind in ("auto", "explicit"):
        for layout in ("data", "full"):
            out[f"{layout}, {kind}"] = training(layout, kind)
            out[f"{layout}, {kind}, divided"] = training(layout, kind, distribute="data")
    pi = {"damping_mode": "pi"}
    out["one, pi"] = training("one", "auto", **pi)
    out["data, pi, divided"] = training("data", "auto", distribute="data", **pi)
    return out


def single() -> dict[str, Any]:
    """In single precision, damped so that rounding is not magnified.

    At a damping of 1e-2 one device is itself 5e-7 away from double precision, and as sums over
    devices have no fixed order, eight are up to 1.2e-6 away from one.
    """
    jax.config.update("jax_enable_x64", False)
    damped = {"damping": 0.1}
    return {
        "one": training("one", "auto", **damped),
        "data": training("data", "auto", distribute="data", **damped),
        "full": training("full", "auto", distribute="data", **damped),
    }


def outside() -> dict[str, Any]:
    """Eager calls: the mesh is that of the parameters."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))
    like = stats.factor_shapes(parameters(), batch_of(0))
    out = {}
    for name, options in (("one", {}), ("divided", {"distribute": "data"})):
        tx = jk.kfac(0.1, like=like, damping=1e-2, refresh_every=2, **options)
        params = jax.device_put(parameters(), NamedSharding(mesh, P()))
        state = jax.device_put(tx.init(params), NamedSharding(mesh, P()))
        for i in range(3):
            batch = jax.device_put(batch_of(i), NamedSharding(mesh, P("data")))
            _, grads, factors = jax.jit(stats)(params, batch)
            updates, state = tx.update(grads, state, params, factors=factors)
            params = jax.tree.map(jnp.add, params, updates)
        out[name] = {path: _text(x) for path, x in params.items()}
    return out


def mapped() -> dict[str, float]:
    """How far three steps on mapped axes are from those of one device."""
    kinds = itertools.product(FORMS, OPTIMIZERS, ("exact",), ("mask", "weights"))
    return differences(8, 3, list(kinds))


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)


if __name__ == "__main__":
    main()
