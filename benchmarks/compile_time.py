"""CPU seconds of tracing and compiling a training step: each optimizer, and what each part adds.

Run: python -m benchmarks.compile_time [--program NAME ...] [--json FILE]

The programs are the two-layer network of the README and two problems of
:mod:`benchmarks.optimizers`. Each step is that of ``jk.Optimizer``, or a plain gradient and
AdamW's update, traced and compiled in a process of its own, with the number of kernels and calls
that XLA's CPU compiler makes of it. "adaptive, ..." is ``jk.kfac()`` with one part left out.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from benchmarks._record import shown, stamp, write
from benchmarks.first_step import measured
from benchmarks.optimizers._kfac import marked
from benchmarks.optimizers._problem import unmarked
from benchmarks.optimizers.problems import PROBLEMS


class Program(NamedTuple):
    """A loss without marks and one with them, parameters and a batch."""

    plain: Callable[[Any, Any], Any]
    objective: Any
    params: Any
    batch: Any


def readme() -> Program:
    """The README's network: 16 to 32 to 3, 256 examples."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        {"kernel": jax.random.normal(key, (n, m)) / n**0.5, "bias": jnp.zeros(m)}
        for key, n, m in zip(keys, (16, 32), (32, 3), strict=False)
    ]

    def network(params: Any, x: Any) -> Any:
        hidden, out = params
        x = jax.nn.relu(x @ hidden["kernel"] + hidden["bias"])
        return x @ out["kernel"] + out["bias"]

    inputs = jax.random.normal(keys[2], (256, 16))
    objective = jk.Objective(network, jk.Categorical())
    return Program(objective, objective, params, (inputs, jnp.argmax(inputs[:, :3], axis=1)))


def of_problem(name: str) -> Program:
    """A problem of the optimizers' benchmark."""
    problem = PROBLEMS[name]
    batch = jax.tree.map(jnp.asarray, problem.batch(problem.data(), 0, 0))
    params = jax.tree.map(jnp.asarray, problem.initial(0))
    plain = lambda params, batch: problem.loss(params, batch, unmarked)
    return Program(plain, lambda p, batch: problem.loss(p, batch, marked), params, batch)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "readme": readme,
    "perceptron": functools.partial(of_problem, "perceptron"),
    "convolution": functools.partial(of_problem, "convolution"),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "fixed": lambda: jk.kfac(0.1),
    "kfe_adam": lambda: jk.kfe_adam(0.01),
    "adaptive": jk.kfac,
    "adaptive, one damping": lambda: jk.kfac(damping=jk.LevenbergMarquardt(factor_every=0)),
    "adaptive, no safeguard": lambda: jk.kfac(damping=jk.LevenbergMarquardt(safeguard=False)),
    "adaptive, given damping": lambda: jk.kfac(damping=0.1),
}
NAMES = ("AdamW", "gradient and factors", *OPTIMIZERS)


def step(program: Program, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step, and its arguments."""
    key = jax.random.key(1)
    if name in OPTIMIZERS:
        opt = jk.Optimizer(program.objective, OPTIMIZERS[name]())
        state = opt.init(program.params, program.batch)
        return opt.step, (program.params, state, program.batch, key)
    if name == "gradient and factors":
        stats = jk.value_grad_and_factors(program.objective, fisher="mc", uncovered="ignore")
        return stats, (program.params, program.batch, key)
    tx = optax.adamw(1e-3)

    def plain(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(program.plain)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return plain, (program.params, tx.init(program.params), program.batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="default: all")
    parser.add_argument("--alone", help="this step alone, in this process")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    names = args.program or list(PROGRAMS)
    if args.alone is not None:
        print(json.dumps(measured(*step(PROGRAMS[names[0]](), args.alone))))
        return
    record: dict[str, Any] = stamp()
    for program in names:
        record[program] = {}
        for name in NAMES:
            words = ["--program", program, "--alone", name]
            command = [sys.executable, "-m", "benchmarks.compile_time", *words]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            record[program][name] = row
            shown(f"{program}: {name}", row)
    write(record, args.json)


if __name__ == "__main__":
    main()
