"""A guard of cost: ratios to a gradient, to AdamW's step and to JAX's solvers, against the record.

Run: python -m benchmarks.quick [--rounds 9] [--write]

- ``factors``: value, gradient and all factors of a dense net, over value and gradient.
- ``factors, sampled``: the same with sampled labels.
- ``factors, quarter``: from a quarter of the rows.
- ``decomposition``: of the net's factors, over ``jnp.linalg.eigh`` of the same matrices.
- ``inverses``: of the net's damped factors, over ``jax.scipy.linalg.cho_solve`` with an identity.
- ``step``: a K-FAC step, with factors and without a refresh, over one of AdamW.
- ``step, adaptive``: the same where damping, learning rate and momentum adapt.
- ``adapters``: value and gradient of LS-LoRA adapters, over those of plain LoRA.
- ``adapters, gradient``: the same, over those of the net's own parameters.

The contestants take turns, and a ratio is that of their least CPU times over the rounds: CPU times
of all threads, because other work on the machine blurs them less than wall times, and the least,
because it only ever adds. Both sides of a ratio call the same routines, because processors differ
in what a solver costs beside a product: 0.9 to 1.7 gradients for one set of inverses. A ratio is
compared with that in ``benchmarks/results/quick-cpu.json``. Above ``BOUND`` times it, it is
measured again, twice at most; where it stays above, it is named, and the command fails. ``--write``
makes the record anew.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from jaxkfac.curvature import invert

RECORD = Path(__file__).parent / "results" / "quick-cpu.json"
BOUND = 1.5
WIDTH, DEPTH, ROWS = 256, 4, 1024
Run = Callable[[], Any]
RATIOS = {
    "factors": ("factors", "gradient"),
    "factors, sampled": ("factors, sampled", "gradient"),
    "factors, quarter": ("factors, quarter", "gradient"),
    "decomposition": ("decomposition", "eigh"),
    "inverses": ("inverses", "cholesky"),
    "step": ("step", "adamw"),
    "step, adaptive": ("step, adaptive", "adamw"),
    "adapters": ("adapters", "lora"),
    "adapters, gradient": ("adapters", "gradient"),
}


def network(params: Any, x: jax.Array) -> jax.Array:
    """Dense layers."""
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return x @ params[-1]


OBJECTIVE = jk.Objective(network, jk.Categorical())


def contestants() -> dict[str, Run]:
    """Everything that is timed, compiled, as functions of nothing."""
    keys = jax.random.split(jax.random.key(0), DEPTH + 2)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys[2:]]
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    batch = x, jax.random.randint(keys[1], (ROWS,), 0, WIDTH)

    def compiled(function: Callable[..., Any], *args: Any) -> Run:
        program = jax.jit(function).lower(*args).compile()
        return functools.partial(program, *args)

    def stats(**options: Any) -> Callable[..., Any]:
        return jk.value_grad_and_factors(OBJECTIVE, **options)

    sampled, key = stats(fisher="mc"), jax.random.key(1)
    factors = jax.jit(sampled)(params, batch, key).factors
    matrices = [side for factor in factors.values() for side in (factor.a, factor.g)]
    found = {
        "gradient": compiled(jax.value_and_grad(OBJECTIVE), params, batch),
        "factors": compiled(stats(), params, batch),
        "factors, sampled": compiled(sampled, params, batch, key),
        "factors, quarter": compiled(stats(subsample=0.25), params, batch, key),
        "decomposition": compiled(
            lambda factors: jk.eigendecompose(factors, placement="device"), factors
        ),
        "inverses": compiled(
            lambda factors: invert(factors, damping=0.1, damping_mode="pi"), factors
        ),
        "eigh": compiled(lambda matrices: [jnp.linalg.eigh(m) for m in matrices], matrices),
        "cholesky": compiled(lambda matrices: [_inverse(m) for m in matrices], matrices),
    }
    fixed = {"learning_rate": 0.1, "damping": 0.1}
    adaptive: dict[str, Any] = {"learning_rate": "quadratic", "momentum": "quadratic"}
    adaptive["damping"] = jk.LevenbergMarquardt(initial=0.1)
    for name, options in {"step": fixed, "step, adaptive": adaptive}.items():
        found[name] = compiled(*_kfac_step(sampled, params, batch, key, **options))
    found["adamw"] = compiled(*_adamw_step(params, batch))
    return found | {
        name: compiled(*_adapters(name, params, batch)) for name in ("adapters", "lora")
    }


def _inverse(matrix: jax.Array) -> jax.Array:
    eye = jnp.eye(len(matrix))
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix + 0.1 * eye), eye)


def _kfac_step(stats: Any, params: Any, batch: Any, key: Any, **options: Any) -> tuple[Any, ...]:
    like = stats.factor_shapes(params, batch, key)
    tx = jk.kfac(like=like, refresh_every=10**6, damping_mode="pi", **options)

    def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
        value, grads, factors = stats(params, batch, key)
        model: dict[str, Any] = {}
        if "momentum" in options:
            model = {"value": value, "value_fn": lambda params: OBJECTIVE(params, batch)}
            model["curvature"] = jk.operators.ggn(OBJECTIVE, params, batch)
        updates, state = tx.update(grads, state, params, factors=factors, **model)
        return optax.apply_updates(params, updates), state

    begun = jax.jit(step)(params, tx.init(params), batch, key)  # its refresh is not timed
    return step, *begun, batch, key


def _adamw_step(params: Any, batch: Any) -> tuple[Any, ...]:
    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.grad(OBJECTIVE)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step, params, tx.init(params), batch


def _adapters(name: str, params: Any, batch: Any) -> tuple[Any, ...]:
    placement = "output" if name == "adapters" else "none"
    config = jk.lslora.Config(rank=8, target=".*", fourier_placement=placement)
    adapters = jk.lslora.init(network, config, params, batch[0], key=jax.random.key(2))
    adapted = jk.lslora.attach(network, config)

    def loss(adapters: Any, params: Any, batch: Any) -> jax.Array:
        z = adapted(params, adapters, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(z, batch[1]).mean()

    return jax.value_and_grad(loss), adapters, params, batch


def measure(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Each ratio of least CPU times over the rounds, whose order turns round each time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            begun = time.process_time()
            jax.block_until_ready(runs[name]())
            times[name].append(time.process_time() - begun)
    return {ratio: min(times[over]) / min(times[under]) for ratio, (over, under) in RATIOS.items()}


def exceeded(found: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """A line for each ratio above its bound, or without one."""
    lines = []
    for name, ratio in found.items():
        bound = BOUND * recorded.get(name, 0.0)
        if not ratio <= bound:
            known = f"{BOUND:g} x the record's {recorded[name]:.3g}" if bound else "no record"
            lines.append(f"{name}: {ratio:.3g}, above {bound:.3g} ({known})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each contestant (default 9)")
    parser.add_argument("--write", action="store_true", help="make the record anew")
    args = parser.parse_args()
    runs = contestants()
    found = measure(runs, args.rounds)
    shown("CPU time, ratios:", found)
    if args.write:
        write(stamp(rounds=args.rounds) | {"ratios": found}, RECORD)
        return
    recorded = json.loads(RECORD.read_text())["ratios"]
    for _ in range(2):
        if not exceeded(found, recorded):
            break
        again = measure(runs, args.rounds)
        shown("again:", again)
        found = {name: min(ratio, again[name]) for name, ratio in found.items()}
    if lines := exceeded(found, recorded):
        sys.exit("\n".join(lines))


if __name__ == "__main__":
    main()
