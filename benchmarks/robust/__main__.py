"""Adaptive K-FAC where units, weights, batches and precision are awkward: does it ever get worse?

Run: python -m benchmarks.robust [--problem gru] [--minutes 30] [--report]

A run is ``jk.kfac(like=like)`` in the loop of the documentation, with nothing chosen. Its measure
after the last step is compared with the one before the first step, on data that stay the same: the
problem's held-out data, or the batch where one batch is all that there is. There are three kinds.

- Three scripts in which adaptive K-FAC once diverged: a perceptron on features that nobody scaled
  and a graph network, on one batch each, and a recurrent network at batches of 32.
- Six problems of ``benchmarks.optimizers``, changed in one respect at a time, three seeds: inputs
  or outputs times 100, initial weights times 5, batches of 8, bfloat16 parameters and data, and one
  fixed batch. Adam at constant rates of 1e-3, 3e-3 and 1e-2 runs on the same; K-FAC counts as stuck
  where it gains less than half of what the best of these gains in as many steps.
- The twelve problems unchanged, seeds 1 to 5, beside the record of ``benchmarks.optimizers``.

A run is a line of ``benchmarks/results/robust.jsonl``, written when it is finished; runs that are
there are not made again, so the table can be made in parts. Compiling is most of the time, except
for convolutions; ``XLA_FLAGS=--xla_backend_optimization_level=0`` halves it, and makes convolutions
20 times slower. A line of the record says which flags it had. ``--report`` writes the page.
"""

import argparse
import datetime
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Without XLA's library for small products, as in benchmarks.optimizers.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_experimental_ynn_fusion_type="]
).strip()

from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers.problems import PROBLEMS
from benchmarks.robust._report import page
from benchmarks.robust._runs import RATES, UNCHANGED, VARIATIONS, Runs, Variation
from benchmarks.robust._scripts import SCRIPTS

RESULTS = Path(__file__).parent.parent / "results"
SIX = ("perceptron", "scaled_regression", "gru", "convolution", "gaussian_autoencoder", "poisson")
STEPS = 100  # of a changed problem
SPIRAL_SEEDS = 24

Planned = tuple[str, Problem, Variation, int, float]


def planned() -> Iterator[Planned]:
    """Method, problem, variation, seed and rate of every run; runs of a program together."""
    for problem in SCRIPTS:
        seeds = range(SPIRAL_SEEDS if problem.name == "spirals" else 3)
        yield from (("kfac", problem, UNCHANGED, seed, 0.0) for seed in seeds)
        for rate in RATES:
            yield from (("adam", problem, UNCHANGED, seed, rate) for seed in seeds)
    for name in (*SIX, *(name for name in PROBLEMS if name not in SIX)):
        problem = PROBLEMS[name]
        yield from (("kfac", problem, UNCHANGED, seed, 0.0) for seed in range(1, 6))
        short = problem._replace(steps=STEPS)
        for variation in VARIATIONS if name in SIX else ():
            yield from (("kfac", short, variation, seed, 0.0) for seed in range(3))
            for rate in RATES:
                yield from (("adam", short, variation, seed, rate) for seed in range(3))


def identity(run: Planned) -> dict[str, Any]:
    """What tells the runs of a record apart."""
    method, problem, variation, seed, rate = run
    names = {"method": method, "problem": problem.name, "variation": variation.name}
    return names | {"seed": seed, "rate": rate, "steps": problem.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problem", action="append", help="default: all")
    parser.add_argument("--minutes", type=float, default=30, help="begin no run after them")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--report", action="store_true", help="write the page; no runs")
    args = parser.parse_args()
    path, end = args.folder / "robust.jsonl", time.monotonic() + 60 * args.minutes
    records = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    if args.report:
        (args.folder / "robust.md").write_text(
            page(records, PROBLEMS, SCRIPTS, map(identity, planned()))
        )
        return
    runs = {"kfac": Runs("kfac"), "adam": Runs("adam")}
    done = [{name: record[name] for name in identity(next(planned()))} for record in records]
    for run in planned():
        method, problem, variation, seed, rate = run
        if identity(run) in done or (args.problem and problem.name not in args.problem):
            continue
        if time.monotonic() > end:
            return
        found = runs[method](problem, variation, seed, rate)
        stamp = {"date": datetime.date.today().isoformat(), "xla_flags": os.environ["XLA_FLAGS"]}
        line = json.dumps(identity(run) | found | stamp)
        print(line[:240], flush=True)
        with path.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
