"""Which diagonal of an elementwise parameter trains better: of each position, or of each example.

Run: python -m benchmarks.scales [--seeds 5] [--markdown FILE]

Parameters that multiply a feature at every position (envelopes of wave functions, the scales of
LayerNorm, gates, the scales of channels) have a diagonal block. ``scales="diagonal"`` squares the
gradient at each position, ``"exact_diagonal"`` the sum over an example's positions, which is the
diagonal of the Fisher. Four networks with such parameters are trained by ``jk.kfac()`` and
``jk.kfac(0.1)`` with either. All else is equal: parameters, batches, sampled labels. The number is
the mean loss of the last fifth of the steps; the table has the median over the seeds of the ratio
of ``exact_diagonal`` to ``diagonal``, with the smallest and the largest, and the ratio of the CPU
time of compiled steps, which take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk

SCALES, STEPS = ("diagonal", "exact_diagonal"), 100
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "jk.kfac()": jk.kfac,
    "jk.kfac(0.1)": lambda: jk.kfac(0.1),
}
Network = tuple[jk.Objective, Any, Callable[[jax.Array], Any]]


def _matrix(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return jax.random.normal(key, (rows, columns)) / rows**0.5


def envelopes(seed: int) -> Network:
    """Sums of products of orbitals with decaying envelopes: positions are particles."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "up": _matrix(keys[0], 4, 32),
        "orbitals": _matrix(keys[1], 32, 8),
        "decay": jnp.ones((3, 8)),
        "weight": jnp.ones((3, 8)) / 3,
    }
    centers = jax.random.normal(keys[2], (3, 3))

    def outputs(p: Any, x: jax.Array) -> jax.Array:
        distance = jnp.linalg.norm(x[:, :, None] - centers, axis=-1)
        h = jnp.tanh(jnp.concatenate([x, distance.sum(-1, keepdims=True)], -1) @ p["up"])
        fall = jnp.exp(-distance[..., None] * p["decay"])
        return (h @ p["orbitals"] * (fall * p["weight"]).sum(2)).sum(1)

    def batch(key: jax.Array) -> Any:
        x = jax.random.normal(key, (64, 6, 3))
        size = jnp.linalg.norm(x, axis=-1)
        return x, jnp.exp(-size).sum(1, keepdims=True) * jnp.sin(jnp.arange(1.0, 9))

    return jk.Objective(outputs, jk.Gaussian()), params, batch


def _normalized(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def layer_norms(seed: int) -> Network:
    """A decoder of one block: positions are tokens, and so are loss terms."""
    keys, width, length = jax.random.split(jax.random.key(seed), 7), 32, 12
    params = {
        "tokens": _matrix(keys[0], 12, width),
        "qkv": _matrix(keys[1], width, 3 * width),
        "out": _matrix(keys[2], width, width),
        "up": _matrix(keys[3], width, 64),
        "down": _matrix(keys[4], 64, width),
        "head": _matrix(keys[5], width, 12),
        "norms": [{"scale": jnp.ones(width), "shift": jnp.zeros(width)} for _ in range(3)],
    }

    def outputs(p: Any, tokens: jax.Array) -> jax.Array:
        norm = lambda k, x: _normalized(x) * p["norms"][k]["scale"] + p["norms"][k]["shift"]
        x = p["tokens"][tokens]
        heads = norm(0, x).reshape(*x.shape[:2], 1, width) @ p["qkv"]
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, -1), is_causal=True)
        x = x + mixed[:, :, 0] @ p["out"]
        x = x + jax.nn.gelu(norm(1, x) @ p["up"]) @ p["down"]
        return norm(2, x) @ p["head"]

    def batch(key: jax.Array) -> Any:
        start, step = jax.random.randint(key, (2, 32, 1), 1, 12)
        text = (start + step * jnp.arange(length + 1)) % 12
        return text[:, :-1], text[:, 1:]

    return jk.Objective(outputs, jk.Categorical()), params, batch


def gates(seed: int) -> Network:
    """Features with a learned gate at each step of a series, and one class for the series."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "up": _matrix(keys[0], 3, 32),
        "gate": jnp.zeros(32),
        "mix": _matrix(keys[1], 32, 32),
        "second": jnp.zeros(32),
        "head": _matrix(keys[2], 32, 4),
    }

    def outputs(p: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ p["up"]) * jax.nn.sigmoid(p["gate"])
        h = jnp.tanh(h @ p["mix"]) * jax.nn.sigmoid(p["second"])
        return h.mean(1) @ p["head"]

    def batch(key: jax.Array) -> Any:
        labels = jax.random.randint(key, (64,), 0, 4)
        phase = jnp.arange(16) * (1 + labels[:, None]) * 0.4
        wave = jnp.stack([jnp.sin(phase), jnp.cos(phase), phase % 1], -1)
        return wave + 0.5 * jax.random.normal(key, wave.shape), labels

    return jk.Objective(outputs, jk.Categorical()), params, batch


def channels(seed: int) -> Network:
    """A convolutional network whose channels have scales: positions are pixels."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "first": jax.random.normal(keys[0], (3, 3, 1, 8)) / 3,
        "scale": jnp.ones(8),
        "second": jax.random.normal(keys[1], (3, 3, 8, 8)) / 72**0.5,
        "other": jnp.ones(8),
        "head": _matrix(keys[2], 8, 5),
    }
    templates = jax.random.normal(keys[3], (5, 8, 8, 1))

    def outputs(p: Any, x: jax.Array) -> jax.Array:
        for kernel, scale in (("first", "scale"), ("second", "other")):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, p[kernel], (1, 1), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.relu(x * p[scale])
        return x.mean((1, 2)) @ p["head"]

    def batch(key: jax.Array) -> Any:
        labels = jax.random.randint(key, (64,), 0, 5)
        return templates[labels] + jax.random.normal(key, (64, 8, 8, 1)), labels

    return jk.Objective(outputs, jk.Categorical()), params, batch


NETWORKS = {f.__name__.replace("_", " "): f for f in (envelopes, layer_norms, gates, channels)}


def trained(network: Callable[[int], Network], tx: Any, seeds: int) -> dict[str, Any]:
    """Final losses of each choice of scales, by seed, and CPU seconds of a step."""
    losses: dict[str, list[float]] = {scales: [] for scales in SCALES}
    seconds: dict[str, list[float]] = {scales: [] for scales in SCALES}
    for seed in range(seeds):
        objective, first, batch_of = network(seed)
        keys, batch_of = jax.random.split(jax.random.key(seed), STEPS), jax.jit(batch_of)
        runs = {}
        for scales in SCALES:
            opt = jk.Optimizer(objective, tx, scales=scales)
            runs[scales] = [jax.jit(opt.step), first, opt.init(first, batch_of(keys[0]))]
        values: dict[str, list[float]] = {scales: [] for scales in SCALES}
        for n, key in enumerate(keys):
            batch = jax.block_until_ready(batch_of(key))
            for scales, run in runs.items():
                begun = time.process_time()
                *run[1:], loss = run[0](*run[1:], batch, key)
                values[scales].append(float(loss))
                if n > 10:
                    seconds[scales].append(time.process_time() - begun)
        for scales in SCALES:
            losses[scales].append(float(np.mean(values[scales][-STEPS // 5 :])))
    return {"losses": losses, "ms": {k: 1e3 * statistics.median(v) for k, v in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    lines = [
        "| network | optimizer | `diagonal` | `exact_diagonal` | ratio, median (least to most) | "
        "CPU time of a step |",
        "|---|---|---|---|---|---|",
    ]
    for name, network in NETWORKS.items():
        for label, build in OPTIMIZERS.items():
            found = trained(network, build(), args.seeds)
            plain, exact = (found["losses"][scales] for scales in SCALES)
            ratios = [y / x for x, y in zip(plain, exact, strict=True)]
            cost = found["ms"]["exact_diagonal"] / found["ms"]["diagonal"]
            lines.append(
                f"| {name} | `{label}` | {statistics.median(plain):.3g} | "
                f"{statistics.median(exact):.3g} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) | {cost:.2f} |"
            )
            print(lines[-1], flush=True)
    if args.markdown is not None:
        note = f"\nMedians of {args.seeds} seeds, {STEPS} steps: `python -m benchmarks.scales`.\n"
        args.markdown.write_text("\n".join([*lines, ""]) + note)


if __name__ == "__main__":
    main()
