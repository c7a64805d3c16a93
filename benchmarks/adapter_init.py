r"""First values of an adapter: by default, from the inputs' covariance (EVA), from the gradient.

Run: python -m benchmarks.adapter_init [--seeds 5] [--write]

A perceptron 64-64-10 is trained on the digits 0 to 4; then a plain LoRA of rank 4 on both kernels
learns all ten digits, with pixels shifted by one, in 150 steps of Adam at each of three rates. The
factors and the gradient are those of the base on the new task's training set. Reported is the
test loss at the end, the mean over seeds, and the paired differences to the default.
"""

import argparse
import resource
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from benchmarks._record import stamp, write
from jaxkfac.data import load_digits

RESULTS = Path(__file__).parent / "results"
INITS: tuple[Literal["default", "eva", "gradient"], ...] = ("default", "eva", "gradient")
RATES, STEPS, RANK = (1e-3, 3e-3, 1e-2), 150, 4


def apply_fn(params: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] + params["last"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS = jax.jit(jk.value_grad_and_factors(OBJECTIVE))
CONFIG = jk.lslora.Config(rank=RANK, alpha=RANK, target="up|down", fourier_placement="none")
ADAPTED = jk.lslora.attach(apply_fn, CONFIG)


def initial(key: Any) -> dict[str, jax.Array]:
    one, two = jax.random.split(key)
    return {
        "up": jax.random.normal(one, (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "down": jax.random.normal(two, (64, 10)) / 8,
        "last": jnp.zeros(10),
    }


def descend(loss: Any, params: Any, batch: Any, rate: Any, steps: int, *more: Any) -> Any:
    """Adam on a whole batch."""
    tx = optax.scale_by_adam()

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch, *more), state)
        return (
            optax.apply_updates(params, jax.tree.map(lambda x: -rate * x, updates)),
            state,
        ), None

    return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0][0]


def adapter_loss(adapters: Any, batch: Any, params: Any) -> jax.Array:
    return OBJECTIVE.loss(ADAPTED(params, adapters, batch[0]), batch[1], None)[0]


@jax.jit
def base_of(params: Any, batch: Any) -> Any:
    return descend(OBJECTIVE, params, batch, 1e-2, 300)


@jax.jit
def tuned(adapters: Any, params: Any, train: Any, test: Any, rate: Any) -> jax.Array:
    found = descend(adapter_loss, adapters, train, rate, STEPS, params)
    return adapter_loss(found, test, params)


def run(seed: int) -> dict[str, list[float]]:
    """Test losses by first values, one for each rate."""
    parts = [load_digits(split, seed=seed) for split in ("train", "test")]
    flat = [(np.reshape(x, (len(x), 64)) * 2 - 1, y) for x, y in parts]
    few = flat[0][1] < 5
    base = tuple(map(jnp.asarray, (flat[0][0][few], flat[0][1][few])))
    shifted = [(np.roll(x.reshape(-1, 8, 8), 1, 2).reshape(-1, 64), y) for x, y in flat]
    train, test = (tuple(map(jnp.asarray, pair)) for pair in shifted)
    key, own = jax.random.split(jax.random.key(seed))
    params = base_of(initial(own), base)
    _, gradient, factors = STATS(params, train)
    sources: dict[str, Any] = {
        "default": {},
        "eva": {"factors": factors},
        "gradient": {"gradient": gradient},
    }
    found = {}
    for kind in INITS:
        adapters = jk.lslora.init(
            apply_fn, CONFIG, params, train[0], key=key, init=kind, **sources[kind]
        )
        found[kind] = [float(tuned(adapters, params, train, test, rate)) for rate in RATES]
    return found


def table(record: dict[str, Any]) -> str:
    runs = np.array([[run[kind] for kind in INITS] for run in record["runs"]])
    rows = [
        "Made by `python -m benchmarks.adapter_init --write` in "
        f"{record['cpu_seconds']:.0f} s of CPU time, {len(runs)} seeds: "
        f"test loss in nats after {STEPS} steps, plain LoRA of rank {RANK}; "
        "in parentheses the mean difference to the default and its range over seeds.",
        "",
        "| rate | default | EVA | gradient |",
        "|---|---|---|---|",
    ]
    for k, rate in enumerate(RATES):
        cells = [f"{runs[:, 0, k].mean():.3f}"]
        for kind in (1, 2):
            change = runs[:, kind, k] - runs[:, 0, k]
            low, high = change.min(), change.max()
            cells.append(
                f"{runs[:, kind, k].mean():.3f} ({change.mean():+.3f}, {low:+.3f} to {high:+.3f})"
            )
        rows.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    runs = [run(seed) for seed in range(args.seeds)]
    used = resource.getrusage(resource.RUSAGE_SELF)
    record = stamp(rates=RATES, steps=STEPS, rank=RANK, seeds=args.seeds)
    record |= {"runs": runs, "cpu_seconds": used.ru_utime + used.ru_stime}
    if args.write:
        write(record, RESULTS / "adapter_init.json")
        (RESULTS / "adapter_init.md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
