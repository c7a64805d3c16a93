r"""Six tasks one after the other: what a network still knows of the earlier ones at the end.

Run: python -m benchmarks.forgetting [--seeds 5] [--tasks 6] [--write]

Permuted digits: each task is the UCI digits with the 64 pixels in an order of its own. A perceptron
64-100-100-10 learns one task after the other, 600 steps of Adam each (1e-3, batches of 64), with
the penalties of all earlier tasks added to the loss. Reported is the mean test accuracy over all
tasks after the last one. Methods: none; L2 around each task's parameters; EWC, the diagonal of
the Fisher; and ``jk.quadratic_penalty``. Curvature is that of sampled labels (``fisher="mc"``) for
the last two. The strength of each method is the best of its grid on seed 1000, which is not among
those reported; where the best is the grid's end, the record says so.
"""

import argparse
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkfac as jk
from benchmarks._record import stamp, write
from jaxkfac.data import load_digits

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "_static" / "forgetting.svg"
STEPS, BATCH, WIDTH, CHOOSING = 600, 64, 100, 1000
GRIDS = {
    "none": [0.0],
    "L2": [1e-3, 1e-2, 1e-1, 1.0],
    "EWC": [1.0, 10.0, 100.0, 1000.0],
    "Kronecker": [1.0, 3.0, 10.0, 30.0, 100.0],
}


def apply_fn(params: Any, x: Any) -> jax.Array:
    for n in range(2):
        x = jnp.tanh(x @ params[f"w{n}"] + params[f"b{n}"])
    return x @ params["w2"] + params["b2"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS = jax.jit(jk.value_grad_and_factors(OBJECTIVE, fisher="mc"))
TX = optax.adam(1e-3)


def initial(key: Any) -> dict[str, jax.Array]:
    sides = 64, WIDTH, WIDTH, 10
    params = {}
    for n, (rows, columns) in enumerate(zip(sides, sides[1:], strict=False)):
        key, own = jax.random.split(key)
        params[f"w{n}"] = jax.random.normal(own, (rows, columns)) / np.sqrt(rows)
        params[f"b{n}"] = jnp.zeros(columns)
    return params


def tasks_of(seed: int, number: int) -> list[tuple[Any, Any]]:
    """``[(train, test)]``, each task's pixels in an order of its own."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(64) for _ in range(number)]
    parts = [load_digits(split, seed=seed) for split in ("train", "test")]
    both = [(np.reshape(x, (len(x), 64)) * 2 - 1, y) for x, y in parts]
    return [tuple((jnp.asarray(x[:, o]), jnp.asarray(y)) for x, y in both) for o in orders]


@jax.jit
def train(params: Any, batch: Any, penalties: list[Any], key: Any) -> Any:
    """One task; the earlier ones' penalties are arguments, so no factor becomes a constant."""

    def step(carry: Any, key: Any) -> Any:
        params, state = carry
        rows = jax.random.choice(key, len(batch[1]), (BATCH,), replace=False)

        def loss(params: Any) -> jax.Array:
            part = OBJECTIVE(params, (batch[0][rows], batch[1][rows]))
            return part + sum(penalty(params) for penalty in penalties)

        updates, state = TX.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, TX.init(params)), jax.random.split(key, STEPS))[0][0]


@jax.jit
def accuracy(params: Any, batch: Any) -> jax.Array:
    return (apply_fn(params, batch[0]).argmax(-1) == batch[1]).mean()


@jax.tree_util.register_pytree_node_class
class DiagonalPenalty:
    """EWC, and with ones in place of the diagonal L2."""

    def __init__(self, anchor: Any, diagonal: Any, strength: Any) -> None:
        self.parts = anchor, diagonal, strength

    def __call__(self, params: Any) -> jax.Array:
        anchor, diagonal, strength = self.parts
        terms = jax.tree.map(lambda x, y, d: (d * (x - y) ** 2).sum(), params, anchor, diagonal)
        return 0.5 * strength * sum(jax.tree.leaves(terms))

    def tree_flatten(self) -> Any:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> "DiagonalPenalty":
        return cls(*parts)


@jax.jit
def diagonal_of(params: Any, batch: Any, key: Any) -> Any:
    """The mean over examples of squared gradients at sampled labels."""
    labels = jax.random.categorical(key, apply_fn(params, batch[0]))

    def one(params: Any, x: Any, y: Any) -> jax.Array:
        return OBJECTIVE(params, (x[None], y[None]))

    each = jax.vmap(jax.grad(one), (None, 0, 0))(params, batch[0], labels)
    return jax.tree.map(lambda g: jnp.square(g).mean(0), each)


def l2(params: Any, batch: Any, key: Any, strength: float) -> Any:
    return DiagonalPenalty(params, jax.tree.map(jnp.ones_like, params), strength)


def ewc(params: Any, batch: Any, key: Any, strength: float) -> Any:
    return DiagonalPenalty(params, diagonal_of(params, batch, key), strength)


def kronecker(params: Any, batch: Any, key: Any, strength: float) -> Any:
    return jk.quadratic_penalty(STATS(params, batch, key).factors, params, strength=strength)


PENALTIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "L2": l2,
    "EWC": ewc,
    "Kronecker": kronecker,
}


def run(method: str, strength: float, seed: int, number: int) -> list[list[float]]:
    """Test accuracies ``[after task][of task]``."""
    tasks, make, penalties, found = tasks_of(seed, number), PENALTIES[method], [], []
    key, own = jax.random.split(jax.random.key(seed))
    params = initial(own)
    for batch, _ in tasks:
        key, order, labels = jax.random.split(key, 3)
        params = train(params, batch, penalties, order)
        if make is not None:
            penalties.append(make(params, batch, labels, strength))
        found.append([float(accuracy(params, test)) for _, test in tasks])
    return found


def picture(runs: dict[str, Any], path: Path) -> None:
    """Accuracy on all tasks so far, as tasks are learned."""
    plt.rcParams.update(jk.plot.FIGURE_STYLE)
    plt.rcParams["svg.hashsalt"] = "forgetting"
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for method, found in runs.items():
        curves = [[np.mean(row[: n + 1]) for n, row in enumerate(run)] for run in found.values()]
        steps = np.arange(1, len(curves[0]) + 1)
        axes.plot(steps, np.mean(curves, 0), label=method)
        axes.fill_between(steps, np.min(curves, 0), np.max(curves, 0), alpha=0.2)
    axes.set(xlabel="tasks learned", ylabel="test accuracy on all of them", ylim=(0.2, 1))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def table(record: dict[str, Any]) -> str:
    rows = [
        "Made by `python -m benchmarks.forgetting --write` in "
        f"{record['cpu_seconds']:.0f} s of CPU time: {record['tasks']} tasks, "
        f"seeds {record['seeds']}. Strengths are the best of their "
        f"grids on seed {CHOOSING}, which is not among them.",
        "",
        "| penalty | strength | mean accuracy | by seed | grid |",
        "|---|---|---|---|---|",
    ]
    for method, found in record["found"].items():
        each = ", ".join(f"{x:.3f}" for x in found["final"])
        grid = ", ".join(f"{s}: {x:.3f}" for s, x in record["grids"][method].items())
        end = " (end of its grid)" if found["at_the_end"] else ""
        mean = np.mean(found["final"])
        rows.append(f"| {method} | {found['strength']:g}{end} | {mean:.3f} | {each} | {grid} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    grids, runs, found = {}, {}, {}
    for method, strengths in GRIDS.items():
        tried = {s: float(np.mean(run(method, s, CHOOSING, args.tasks)[-1])) for s in strengths}
        best = max(tried, key=lambda s: tried[s])
        runs[method] = {seed: run(method, best, seed, args.tasks) for seed in range(args.seeds)}
        final = [float(np.mean(x[-1])) for x in runs[method].values()]
        grids[method] = {f"{s:g}": x for s, x in tried.items()}
        at_the_end = len(strengths) > 1 and best in (strengths[0], strengths[-1])
        found[method] = {"strength": best, "final": final, "at_the_end": at_the_end}
        print(method, best, np.round(final, 3), {k: round(v, 3) for k, v in grids[method].items()})
    used = resource.getrusage(resource.RUSAGE_SELF)
    record = stamp(tasks=args.tasks, seeds=list(range(args.seeds)), steps=STEPS)
    record |= {"cpu_seconds": used.ru_utime + used.ru_stime, "found": found, "grids": grids}
    record["accuracies"] = {m: {str(s): x for s, x in r.items()} for m, r in runs.items()}
    if args.write:
        write(record, RESULTS / "forgetting.json")
        (RESULTS / "forgetting.md").write_text(table(record))
        picture(runs, PICTURE)
    print(table(record))


if __name__ == "__main__":
    main()
