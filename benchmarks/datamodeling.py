"""Do scores foretell training? The linear datamodeling score, on the digits, beside kronfluence.

Run: python -m benchmarks.datamodeling [--kronfluence ENV/bin/python] [--json FILE]
[--markdown FILE]

A perceptron is trained on all training digits, and again from the same start on random halves of
them. For each query, a test digit, the sum of its scores over a half is set beside minus its loss
under the network of that half, by Spearman's rank correlation over the halves; the mean over
queries is the linear datamodeling score (Park et al., "TRAK: Attributing Model Behavior at
Scale", 2023). The interval is a bootstrap's over queries, with the halves as they are. Every
method scores the one network that was trained on all, in a process of its own.
"""

import argparse
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._record import shown, stamp, write
from benchmarks._uses.jobs import job, ours, theirs
from benchmarks._uses.models import perceptron
from benchmarks._uses.problems import Problem
from jaxkfac.data import load_digits

WIDTH, STEPS, RATE, PENALTY, RESAMPLES = 32, 300, 1e-2, 1e-3, 2000
FISHERS = {"ours": ("exact", "mc", "empirical"), "kronfluence": ("mc", "empirical")}


def losses(params: Any, batch: tuple[Any, Any]) -> jax.Array:
    """Of each example, ``(N,)``."""
    logits = jax.nn.log_softmax(perceptron(params, batch[0]))
    return -jnp.take_along_axis(logits, batch[1][:, None], 1)[:, 0]


def trained(params: Any, batch: tuple[Any, Any]) -> Any:
    """Adam over the whole batch, with half a penalty's square added to the mean loss."""
    tx = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    def loss(params: Any) -> jax.Array:
        squares = [jnp.square(x).sum() for x in jax.tree.leaves(params)]
        return losses(params, batch).mean() + PENALTY / 2 * sum(squares)

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, tx.init(params)), length=STEPS)[0][0]


def start(seed: int) -> dict[str, jax.Array]:
    """Parameters before training."""
    rng, sizes = np.random.default_rng(seed), (64, WIDTH, WIDTH, 10)
    found: dict[str, Any] = {}
    for i, sides in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        found[f"layers.{i}.w"] = rng.normal(size=sides) / sides[0] ** 0.5
        found[f"layers.{i}.b"] = np.zeros(sides[1])
    return {name: jnp.asarray(x, jnp.float32) for name, x in found.items()}


def correlations(scores: np.ndarray, subsets: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Spearman's, of each query: ``(Q, N)`` scores, ``(S, n)`` places, ``(S, Q)`` losses."""
    sums = np.stack([scores[:, subset].sum(1) for subset in subsets])
    ranks = [x.argsort(0).argsort(0) for x in (sums, -losses)]
    first, second = (x - x.mean(0) for x in ranks)
    return (first * second).sum(0) / np.sqrt(np.square(first).sum(0) * np.square(second).sum(0))


def interval(values: np.ndarray) -> dict[str, Any]:
    """The mean, and a 95 % interval of it."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    return {"mean": float(values.mean()), "interval": np.quantile(means, (0.025, 0.975)).tolist()}


def measure(subsets: int, queries: int, kronfluence: Path | None) -> dict[str, Any]:
    """The score of each method, and ours less kronfluence's for the same Fisher."""
    data = [load_digits(split, seed=0) for split in ("train", "test")]
    (x, y), (q_x, q_y) = (
        (one.images.reshape(-1, 64).astype(np.float32), np.asarray(one.labels, np.int64))
        for one in data
    )
    x, y = x[: len(x) // 2 * 2], y[: len(x) // 2 * 2]
    chosen = np.random.default_rng(1).permutation(len(q_y))[:queries]
    q_x, q_y = q_x[chosen], q_y[chosen]
    rng = np.random.default_rng(2)
    halves = np.stack([rng.permutation(len(y))[: len(y) // 2] for _ in range(subsets)])
    first = start(0)
    params = jax.jit(trained)(first, (jnp.asarray(x), jnp.asarray(y)))
    found = jax.jit(
        lambda halves, x, y: jax.lax.map(
            lambda half: losses(trained(first, (x[half], y[half])), (q_x, q_y)), halves
        )
    )(halves, x, y)
    arrays = {name: np.asarray(leaf) for name, leaf in params.items()}
    arrays |= {"inputs": x, "targets": y, "q_inputs": q_x, "q_targets": q_y}
    problem = Problem("perceptron", WIDTH, len(y), queries, len(y) // 2)
    each: dict[str, np.ndarray] = {}
    for who, fishers in FISHERS.items():
        if who == "ours":
            command = ours("influence")
        elif kronfluence is None:
            continue
        else:
            command = theirs(kronfluence, "kronfluence_influence")
        for fisher in fishers:
            options = {"arrays": arrays, "fisher": fisher, "keep": False}
            _, results = job(command, problem, "float32", **options)
            each[f"{who}, {fisher}"] = correlations(results["pairwise"], halves, np.asarray(found))
    record: dict[str, Any] = {
        "accuracy": float((np.asarray(perceptron(params, q_x)).argmax(1) == q_y).mean()),
        "scores": {name: interval(values) for name, values in each.items()},
        "ours less kronfluence": {},
    }
    for fisher in FISHERS["kronfluence"]:
        if (other := each.get(f"kronfluence, {fisher}")) is not None:
            difference = each[f"ours, {fisher}"] - other
            record["ours less kronfluence"][fisher] = interval(difference)
    return record


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "# The linear datamodeling score on the digits",
        "",
        f"`python -m benchmarks.datamodeling --kronfluence ENV/bin/python`, {record['date']}, "
        f"{record['cpu_seconds']:.0f} s of CPU: a perceptron 64-{WIDTH}-{WIDTH}-10, "
        f"{record['subsets']} random halves of the training digits, {record['queries']} test "
        "digits as queries. Means over queries with 95 % bootstrap intervals over them.",
        "",
        "| Scores | Fisher | score | interval |",
        "|---|---|---|---|",
    ]
    for name, one in record["scores"].items():
        low, high = one["interval"]
        who, fisher = name.split(", ")
        lines.append(f"| {who} | {fisher} | {one['mean']:.3f} | {low:.3f} to {high:.3f} |")
    for fisher, one in record["ours less kronfluence"].items():
        low, high = one["interval"]
        lines += [
            "",
            f"Ours less kronfluence's, `{fisher}`: {one['mean']:+.4f} ({low:+.4f} to {high:+.4f}).",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subsets", type=int, default=40, help="networks (default 40)")
    parser.add_argument("--queries", type=int, default=100, help="test digits (default 100)")
    parser.add_argument("--kronfluence", type=Path, help="the Python of an environment with it")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    command = " ".join(["python -m benchmarks.datamodeling", *sys.argv[1:]])
    record = stamp(command=command, subsets=args.subsets, queries=args.queries)
    record |= measure(args.subsets, args.queries, args.kronfluence)
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    record["cpu_seconds"] = sum(x.ru_utime + x.ru_stime for x in used)
    shown("scores", {name: one["mean"] for name, one in record["scores"].items()})
    write(record, args.json)
    if args.markdown is not None:
        args.markdown.write_text(table(record))


if __name__ == "__main__":
    main()
