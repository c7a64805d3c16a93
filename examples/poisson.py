"""Poisson's equation by a small network: a step in sample space, beside four other optimizers.

    python examples/poisson.py

A tanh network u(x, y) of 4,417 parameters learns to make |laplacian(u) + f|^2 small inside the unit
square and |u|^2 on its edge. It is compared with the true solution sin(pi x) sin(pi y). All get
the same CPU seconds. `jk.spring()` and `jk.kfac()` are as they come, and `jk.spring()` draws 100
points of each kind at every step; SOAP, AdamW and L-BFGS have the best settings of a grid
(`python -m benchmarks.optimizers --problem poisson`). Steps of `jk.spring()` become shorter over
the last 0.3 of the time, and the learning rates of SOAP and AdamW fall to zero over the second
half.
"""

import argparse
import importlib.metadata
import json
import os
import time
from pathlib import Path

# jaxlib 0.10.2 takes four times as long for products this small with a library of its own.
if importlib.metadata.version("jaxlib") == "0.10.2":
    without = "--xla_cpu_experimental_ynn_fusion_type="
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {without}".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk


def solution(x):
    """What the right-hand side is made from, zero on the edge."""
    return jnp.sin(jnp.pi * x).prod(-1)


def network(params, x):
    """The solution at rows of coordinates, or at one point."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[..., 0]


def equation(params, inside):
    """What is zero for the solution."""
    curved = jax.vmap(jax.hessian(network, 1), (None, 0))(params, inside)
    return jnp.trace(curved, axis1=1, axis2=2) + 2 * jnp.pi**2 * solution(inside)


def loss(params, points, weights=(1.0, 1.0)):
    """The residual inside and the values on the edge, marked; weights are those of drawn points."""
    (inside, edge), (of_inside, of_edge) = points, map(jnp.sqrt, weights)
    residual = jk.mark_outputs(of_inside * equation(params, inside), jk.Gaussian())
    border = jk.mark_outputs(of_edge * network(params, edge), jk.Gaussian(), weight=10.0)
    return 0.5 * jnp.square(residual).mean() + 5.0 * jnp.square(border).mean()


def points(rng):
    """900 inside, 900 on the edge, and 2,500 at which the solution is compared."""
    edge = rng.uniform(size=(900, 2))
    edge[np.arange(900), np.arange(900) % 2] = np.arange(900) // 2 % 2
    sets = rng.uniform(size=(900, 2)), edge, rng.uniform(size=(2500, 2))
    return tuple(jnp.asarray(x, jnp.float32) for x in sets)


def initial(rng):
    """Glorot's kernels."""
    sizes = [(2, 64), (64, 64), (64, 1)]
    kernels = [rng.uniform(-1, 1, s) * np.sqrt(6 / sum(s)) for s in sizes]
    params = [{"w": w, "b": np.zeros(w.shape[1])} for w in kernels]
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def spring(params, batch):
    """The default, on points that are drawn where their residuals are large."""
    opt = jk.Optimizer(lambda params, batch: loss(params, *batch), jk.spring())
    draws = [jk.draw_rows(*both, 100) for both in zip(batch, (equation, network), strict=True)]
    pools = [draw.init(params, jax.random.key(0)) for draw in draws]
    few = tuple(x[:100] for x in batch), (jnp.ones(100), jnp.ones(100))

    def step(params, state, progress):
        state, pools = state
        drawn, new_pools = [], []
        for draw, pool in zip(draws, pools, strict=True):
            key = jax.random.fold_in(jax.random.key(len(drawn)), pool.step)
            rows, pool = draw.draw(pool, params, key)
            drawn.append(rows)
            new_pools.append(pool)
        points, weights, _ = zip(*drawn, strict=True)
        moved, state, _ = opt.step(params, state, (points, weights))
        scale = jnp.minimum(1.0, (1 - progress) / 0.3)
        params = jax.tree.map(lambda x, y: x + scale * (y - x), params, moved)
        return params, (state, new_pools)

    return (opt.init(params, few), pools), step


def kfac(params, batch):
    """The default: rate, momentum and dampings are chosen by the quadratic model."""
    opt = jk.Optimizer(loss, fisher="exact")

    def step(params, state, progress):
        params, state, _ = opt.step(params, state, batch)
        return params, state

    return opt.init(params, batch), step


def with_rate(tx, params, batch, **extra):
    """An optimizer of gradients; its rate falls to zero over the second half."""

    def step(params, state, progress):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params, **extra)
        scale = jnp.minimum(1.0, 2 * (1 - progress))
        return optax.apply_updates(params, optax.tree.scale(scale, updates)), state

    return tx.init(params), step


def soap(params, batch):
    """SOAP is Adam in the eigenbasis of the gradient's own covariances."""
    like = jk.value_grad_and_factors(loss, fisher="exact").factor_shapes(params, batch)
    tx = jk.kfe_adam(1e-2, like=like, covariance="gradient", b1=0.95, b2=0.95)
    return with_rate(tx, params, batch, factors=None)


def lbfgs(params, batch):
    """With optax's line search."""
    tx, value_fn = optax.lbfgs(memory_size=30), lambda params: loss(params, batch)

    def step(params, state, progress):
        value, grads = optax.value_and_grad_from_state(value_fn)(params, state=state)
        search = {"value": value, "grad": grads, "value_fn": value_fn}
        updates, state = tx.update(grads, state, params, **search)
        return optax.apply_updates(params, updates), state

    return tx.init(params), step


METHODS = {
    "jk.spring()": spring,
    "jk.kfac()": kfac,
    "SOAP, rate 0.01": soap,
    "L-BFGS, memory 30": lbfgs,
    "AdamW, rate 0.03": lambda params, batch: with_rate(optax.adamw(3e-2), params, batch),
}


def train(make, params, batch, others, seconds):
    """CPU seconds, without compilation and comparison, and relative errors."""
    state, step = make(params, batch)
    state = jax.tree.map(jnp.copy, state)
    compiled = jax.jit(step).lower(params, state, jnp.float32(0)).compile()
    true = solution(others)
    error = jax.jit(lambda p: jnp.linalg.norm(network(p, others) - true) / jnp.linalg.norm(true))
    times, errors, spent = [0.0], [float(error(params))], 0.0
    for due in seconds * (np.arange(1, 33) / 32) ** 2:
        while spent < due:
            begun = time.process_time()
            progress = jnp.float32(min(1.0, spent / seconds))
            params, state = jax.block_until_ready(compiled(params, state, progress))
            spent += time.process_time() - begun
        times.append(spent)
        errors.append(float(error(params)))
    return times, errors


def draw(curves, path):
    """Errors over CPU seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, (times, errors) in curves.items():
        axes.semilogy(times, errors, label=name, lw=2.4 if name.startswith("jk.") else 1.4)
    axes.set(xlabel="CPU seconds of training", ylabel="relative error of the solution")
    axes.set_title("Poisson's equation, 4,417 parameters", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of CPU time, each optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/poisson"))
    args = parser.parse_args()
    *batch, others = points(np.random.default_rng(0))
    curves, first = {}, None
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, make in METHODS.items():
        params = initial(np.random.default_rng(args.seed))
        curves[name] = times, errors = train(make, params, tuple(batch), others, args.seconds)
        first = errors[-1] if first is None else first
        more = "" if name == "jk.spring()" else f", {errors[-1] / first:.1f} times jk.spring's"
        print(f"{name:20} error {errors[0]:.2g} -> {errors[-1]:.2g} in {times[-1]:.0f} CPU s{more}")
    record = {"seconds": args.seconds, "seed": args.seed, "curves": curves}
    (args.folder / "poisson.json").write_text(json.dumps(record) + "\n")
    draw(curves, args.folder / "poisson.svg")
    print(f"figure: {(args.folder / 'poisson.svg').resolve()}")


if __name__ == "__main__":
    main()
