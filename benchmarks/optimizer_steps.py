"""Cost of a K-FAC step: beside kfac-jax, and of its preconditioning with four and two products.

Run: python -m benchmarks.optimizer_steps [--peer ENV/bin/python] [--blocks 12] [--json FILE]
     python -m benchmarks.optimizer_steps --peer ENV/bin/python --first [--json FILE]
     python -m benchmarks.optimizer_steps --packed [--blocks 12] [--json FILE]

The program is the autoencoder of the K-FAC papers, 784-1000-500-250-30 and mirrored, tanh, on
the embedded digits enlarged to 28 x 28: Bernoulli pixels, batches of 256, sampled Fisher, a
refresh every 5 steps, damping 0.1 split by pi. The peer is kfac-jax, in an environment of its
own, where ``pip install kfac-jax==0.0.8 jax==0.8.1`` has been run; it takes its steps in a
process of its own when it is told to, so that the two never run at the same time. It runs without
XNNPACK, whose products there read what a donated parameter held before. Settings are "fixed"
(learning rate 0.1, damping 0.1, norm constraint 1, momentum 0.9) and "adaptive" (damping from 0.1
on, learning rate and momentum chosen by the quadratic model); the rows say ours, then the peer's.
"default" is ``jk.kfac(like=like)``, "one damping" the same without trials of the factors' damping.

Times are of blocks of 5 steps, so that each holds one refresh. Ours and the peer's alternate,
and a ratio is the median over pairs of blocks. ``first_step_s`` is the first call, compilation
and all. Beside wall time there is the CPU time of all threads, which other work on the machine
blurs less. ``--first`` measures the CPU time of the first step, and of the first ten with every
program that they compile, and nothing else. ``--packed`` measures fixed steps with factors and
state packed beside those in full, in alternating blocks, and nothing else. Of an update of 48
unrolled layers there is the CPU time of tracing and compiling; ``python -m benchmarks.accelerators
--target h100 --size others`` compiles it for an H100.
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.factors import seconds
from jaxkfac.curvature import invert, precondition
from jaxkfac.data import load_digits

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
BATCH, PERIOD, RATE, DAMPING, CONSTRAINT = 256, 5, 0.1, 0.1, 1.0
UNROLLED = 48  # layers of the update that is compiled
PEER = Path(__file__).parent / "_kfac_jax_steps.py"


class Block(NamedTuple):
    """Seconds of one block of steps, and the loss at its end."""

    wall: float
    cpu: float
    loss: float


class Problem(NamedTuple):
    """Initial parameters and data, as NumPy arrays."""

    weights: list[np.ndarray]
    images: np.ndarray


def problem(seed: int = 0) -> Problem:
    """Glorot's initialisation; pixels in [0, 1], each repeated to 28 x 28 and cut."""
    images = np.asarray(load_digits("train", seed=seed)[0], np.float32)
    images = np.repeat(np.repeat(images.reshape(-1, 8, 8), 4, 1), 4, 2)[:, 2:-2, 2:-2]
    rng = np.random.default_rng(seed)
    weights = []
    for n, m in zip(SIZES, SIZES[1:], strict=False):
        limit = np.sqrt(6 / (n + m))
        weights.append(rng.uniform(-limit, limit, (n, m)).astype(np.float32))
    return Problem(weights, images.reshape(len(images), -1))


def autoencoder(params: Any, x: jax.Array) -> jax.Array:
    """Logits of the pixels."""
    for i, p in enumerate(params):
        x = x @ p["w"] + p["b"]
        x = x if i in (len(params) // 2 - 1, len(params) - 1) else jnp.tanh(x)
    return x


class Ours:
    """K-FAC of this library, with factors and state packed or in full."""

    def __init__(self, data: Problem, settings: str, *, packed: bool = False) -> None:
        params = [{"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for w in data.weights]
        objective = jk.Objective(autoencoder, jk.Bernoulli())
        stats = jk.value_grad_and_factors(objective, fisher="mc", packed=packed)
        self._images, self._taken = data.images, 0
        batch = self._batch()
        like = stats.factor_shapes(params, batch, jax.random.key(0))
        shared: Any = {"like": like, "refresh_every": PERIOD, "damping_mode": "pi"}
        told = settings in ("default", "one damping")
        if settings == "default":
            tx = jk.kfac(like=like)
        elif settings == "one damping":
            tx = jk.kfac(like=like, damping=jk.LevenbergMarquardt(factor_every=0))
        elif settings == "adaptive":
            damping = jk.LevenbergMarquardt(initial=DAMPING)
            tx = jk.kfac("quadratic", momentum="quadratic", damping=damping, **shared)
        else:
            tx = jk.kfac(RATE, damping=DAMPING, norm_constraint=CONSTRAINT, **shared)

        def step(params: Any, state: Any, batch: Any, key: Any) -> Any:
            value, grads, factors = stats(params, batch, key)
            model: dict[str, Any] = {}
            if told:
                model = stats.adaptation(params, batch, key)
            elif settings == "adaptive":
                loss = functools.partial(objective, batch=batch)
                model = {"value": value, "value_fn": loss}
                model["curvature"] = jk.operators.ggn(objective, params, batch)
            updates, state = tx.update(grads, state, params, factors=factors, **model)
            return optax.apply_updates(params, updates), state, value

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self.state = params, tx.init(params)

    @property
    def curvature_bytes(self) -> int:
        """Bytes of the average of the factors, and of what is computed from it."""
        _, state = self.state
        return sum(x.nbytes for x in jax.tree.leaves((state.stacked_average, state.stacked_bases)))

    def _batch(self) -> Any:
        x = jnp.asarray(rows(self._images, self._taken))
        return x, x

    def block(self, steps: int) -> Block:
        """Take some steps."""
        wall, cpu, value = time.perf_counter(), time.process_time(), None
        for _ in range(steps):
            key = jax.random.key(self._taken)
            *self.state, value = self._step(*self.state, self._batch(), key)
            self._taken += 1
        loss = float(value)
        return Block(time.perf_counter() - wall, time.process_time() - cpu, loss)


class Peer:
    """kfac-jax in another process."""

    def __init__(self, python: Path, data: Problem, settings: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "problem.npz"
        weights = {f"w{i}": w for i, w in enumerate(data.weights)}
        np.savez(file, images=data.images, **weights)
        # -P: else modules here hide those of the standard library, as numbers
        command = [python, "-P", PEER, file, settings]
        command += [BATCH, PERIOD, RATE, DAMPING, CONSTRAINT]
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        first = self._answer()
        self.versions, self.curvature_bytes = first["versions"], first["curvature_bytes"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"kfac-jax ended with status {self._process.wait()}")
        return json.loads(line)

    def block(self, steps: int) -> Block:
        """Take some steps."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return Block(*self._answer())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def rows(images: np.ndarray, step: int) -> np.ndarray:
    """The batch of a step: the images in order, round and round."""
    return images[(np.arange(BATCH) + step * BATCH) % len(images)]


def beside_peer(
    python: Path, data: Problem, settings: tuple[str, str], blocks: int
) -> dict[str, Any]:
    """Figures of both, in alternating blocks."""
    ours, peer = Ours(data, settings[0]), Peer(python, data, settings[1])
    first = ours.block(1), peer.block(1)
    ours.block(2 * PERIOD - 1), peer.block(2 * PERIOD - 1)  # the peer compiles a second program
    pairs = [(ours.block(PERIOD), peer.block(PERIOD)) for _ in range(blocks)]
    peer.close()
    return {
        "versions": peer.versions,
        "ours_step_ms": 1e3 / PERIOD * statistics.median(a.wall for a, _ in pairs),
        "peer_step_ms": 1e3 / PERIOD * statistics.median(b.wall for _, b in pairs),
        "step_ratio": statistics.median(a.wall / b.wall for a, b in pairs),
        "step_cpu_ratio": statistics.median(a.cpu / b.cpu for a, b in pairs),
        "first_step_s": first[0].wall,
        "peer_first_step_s": first[1].wall,
        "first_step_ratio": first[0].wall / first[1].wall,
        "steps": (2 + blocks) * PERIOD,
        "losses": [round(a.loss, 1) for a, _ in pairs],  # at the ends of blocks
        "peer_losses": [round(b.loss, 1) for _, b in pairs],
    }


def packed_beside_dense(data: Problem, blocks: int) -> dict[str, float]:
    """Steps with one triangle of each matrix over steps with all of it, in alternating blocks."""
    packed, dense = (Ours(data, "fixed", packed=x) for x in (True, False))
    packed.block(2 * PERIOD), dense.block(2 * PERIOD)
    pairs = [(packed.block(PERIOD), dense.block(PERIOD)) for _ in range(blocks)]
    return {
        "packed_step_ms": 1e3 / PERIOD * statistics.median(a.wall for a, _ in pairs),
        "dense_step_ms": 1e3 / PERIOD * statistics.median(b.wall for _, b in pairs),
        "step_ratio": statistics.median(a.wall / b.wall for a, b in pairs),
        "step_cpu_ratio": statistics.median(a.cpu / b.cpu for a, b in pairs),
    }


def first_steps(python: Path, data: Problem, settings: tuple[str, str]) -> dict[str, Any]:
    """CPU seconds of the first step, and of the first ten, of both; compilation included.

    What comes before the first step, the shapes of the factors and the state, counts for neither.
    """
    ours = Ours(data, settings[0])
    mine = [ours.block(1).cpu, ours.block(2 * PERIOD - 1).cpu]
    peer = Peer(python, data, settings[1])
    theirs = [peer.block(1).cpu, peer.block(2 * PERIOD - 1).cpu]
    peer.close()
    return {
        "versions": peer.versions,
        "first_step_cpu_s": mine[0],
        "peer_first_step_cpu_s": theirs[0],
        "first_step_cpu_ratio": mine[0] / theirs[0],
        "ten_steps_cpu_s": sum(mine),
        "peer_ten_steps_cpu_s": sum(theirs),
        "ten_steps_cpu_ratio": sum(mine) / sum(theirs),
    }


def preconditioning(data: Problem, pairs: int) -> dict[str, float]:
    """Two products with stored inverses against four with eigenvectors, in interleaved pairs."""
    params = [{"w": jnp.asarray(w), "b": jnp.zeros(w.shape[1])} for w in data.weights]
    x = jnp.asarray(rows(data.images, 0))
    stats = jax.jit(jk.value_grad_and_factors(jk.Objective(autoencoder, jk.Bernoulli())))
    _, grads, factors = stats(params, (x, x))
    how: dict[str, Any] = {"damping": DAMPING, "damping_mode": "pi"}
    bases = jax.jit(lambda f: jk.eigendecompose(f, placement="device"))(factors)
    inverses = jax.jit(lambda f: invert(f, **how))(factors)
    four = jax.jit(lambda g, b: jk.natural_gradient(g, b, **how))
    two = jax.jit(precondition)
    runs: tuple[Callable[[], Any], ...] = (
        lambda: seconds(four, grads, bases),
        lambda: seconds(two, grads, inverses),
    )
    for run in runs:
        run()
    times = [(runs[0](), runs[1]()) for _ in range(pairs)]
    return {
        "four_products_ms": 1e3 * statistics.median(a for a, _ in times),
        "two_products_ms": 1e3 * statistics.median(b for _, b in times),
        "preconditioning_ratio": statistics.median(b / a for a, b in times),
    }


def unrolled_update(layers: int, dtype: Any, **options: Any) -> tuple[Callable[..., Any], Any]:
    """``tx.update`` of equal layers without a scan, every safety on, and its arguments' shapes."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return x

    params = [{"w": of((64, 64)), "b": of((64,))} for _ in range(layers)]
    stats = jk.value_grad_and_factors(jk.Objective(apply, jk.Gaussian()))
    like = stats.factor_shapes(params, (of((32, 64)), of((32, 64))))
    safe: dict[str, Any] = {"norm_constraint": 1e-2, "weight_decay": 1e-4}
    tx = jk.kfac(0.1, like=like, damping=1e-3, **safe, **options)

    def update(grads: Any, state: Any, params: Any, factors: Any) -> Any:
        return tx.update(grads, state, params, factors=factors)

    return update, (params, jax.eval_shape(tx.init, params), params, like)


def compilation(mode: str) -> dict[str, float]:
    """CPU seconds of tracing and compiling the update of unrolled layers."""
    update, shapes = unrolled_update(UNROLLED, jnp.float32, damping_mode=mode)
    begun = time.process_time()
    lowered = jax.jit(update).lower(*shapes)
    traced = time.process_time()
    lowered.compile()
    return {"trace_cpu_s": traced - begun, "compile_cpu_s": time.process_time() - traced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="the Python of an environment with kfac-jax")
    parser.add_argument("--first", action="store_true", help="the first steps alone")
    parser.add_argument("--packed", action="store_true", help="packed steps beside dense ones")
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks (default 12)")
    parser.add_argument("--pairs", type=int, default=21, help="of preconditionings (default 21)")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.first and args.peer is None:
        parser.error("--first needs --peer")
    if args.first:
        record, data = stamp(), problem()
        for settings in (("fixed", "fixed"), ("default", "adaptive"), ("one damping", "adaptive")):
            name = ", ".join(settings)
            record[name] = first_steps(args.peer, data, settings)
            shown(name, record[name])
        write(record, args.json)
        return
    if args.packed:
        record = stamp(blocks=args.blocks, packed=packed_beside_dense(problem(), args.blocks))
        shown("packed beside dense", record["packed"])
        write(record, args.json)
        return
    record, data = stamp(blocks=args.blocks, pairs=args.pairs), problem()
    record["preconditioning"] = preconditioning(data, args.pairs)
    shown("preconditioning", record["preconditioning"])
    for mode in ("exact", "pi"):
        name = f"update of {UNROLLED} layers, {mode}"
        record[name] = compilation(mode)
        shown(name, record[name])
    if args.peer is not None:
        for settings in (("fixed", "fixed"), ("fixed", "adaptive"), ("adaptive", "adaptive")):
            name = ", ".join(settings)
            record[name] = beside_peer(args.peer, data, settings, args.blocks)
            shown(name, record[name])
    write(record, args.json)


if __name__ == "__main__":
    main()
