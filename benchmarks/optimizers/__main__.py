"""Optimizers on a few problems: validation after equal steps and equal time, over five seeds.

Run: python -m benchmarks.optimizers [--equal-steps] [--problem autoencoder] [--method adamw]
     [--minutes 30] [--peer ENV/bin/python] [--report]

There are two comparisons. At equal time (five problems, without ``--equal-steps``) every optimizer
has four settings or five: some got a fifth where the best on Poisson's equation lay at an edge at
first, and the page names those that lie there still. Each setting is run once for a third of the
budget (seed 0). The one with the least validation measure is run on five other seeds for the whole
budget, in rounds: seed 1 of all optimizers, then seed 2. A learning rate that is given falls to
zero over the second half of the budget. Time is CPU time of all threads in training steps, data
included, without compilation and evaluation; wall time is beside it. The process has one core
(``--core``): where something else runs, threads that wait for each other in a loop would be counted
too. The target that times are told for is fixed by AdamW: its median at the end of the budget.

At equal steps (all problems, ``--equal-steps``) every optimizer runs with the settings that its own
documentation gives, on seed 0 and on the five others: nothing is tuned. Documentation gives
constant rates, so nothing is annealed there. Beside that, the peers are tuned: seed 0 chooses among
their rates, each constant and annealed over the second half of the steps, and the best one runs on
the five other seeds. On the three costly problems a peer takes the setting that it has from the
first comparison, unless all of its choices have run. Runs of ``jk.kfac(like=like)`` and
``jk.kfe_adam`` go on to the CPU seconds of the first comparison, where a problem has them. Settings
that differ only in rates share a program.

A run is a line of ``benchmarks/results/optimizers/<problem>.jsonl``, written when it is finished;
runs that are there are not made again, so a comparison can be made in parts. A run that fails is a
line with its error. kfac-jax needs an environment of its own (``pip install kfac-jax==0.0.8
jax==0.8.1``), which ``--peer`` names; without it, its runs are left for later. ``--report`` writes
the page and the figures from what there is.
"""

import argparse
import importlib.metadata
import os
import subprocess
import time
from pathlib import Path

# jaxlib 0.10.2 gives small products to YNNPACK, and a PINN's gradient takes four times the CPU time
# of 0.8.1, which kfac-jax has: 12.1 ms, 2.63, and 2.78 without YNNPACK (python -m
# benchmarks.optimizers._gradient_time poisson). What is compared are optimizers, so none has it.
if importlib.metadata.version("jaxlib") == "0.10.2":
    without = "--xla_cpu_experimental_ynn_fusion_type="
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {without}".strip()

from benchmarks.optimizers._equal_steps import missing_at_steps
from benchmarks.optimizers._peer import VARIABLE
from benchmarks.optimizers._record import FOLDER, Record
from benchmarks.optimizers._runs import missing, run_of
from benchmarks.optimizers.methods import METHODS
from benchmarks.optimizers.problems import PROBLEMS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--equal-steps", action="store_true", help="make the runs of equal steps")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="default: all")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--minutes", type=float, default=30, help="begin no run after them")
    parser.add_argument("--peer", type=Path, help="the Python of an environment with kfac-jax")
    parser.add_argument("--core", type=int, help="to run on; by default the last")
    parser.add_argument("--shared", action="store_true", help="note that other work runs beside it")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the record")
    parser.add_argument("--report", action="store_true", help="write page and figures; no runs")
    args = parser.parse_args()
    if args.report:
        from benchmarks.optimizers._report import write_report

        write_report(args.folder)
        return
    if hasattr(os, "sched_setaffinity"):  # before JAX counts cores
        core = max(os.sched_getaffinity(0)) if args.core is None else args.core
        os.sched_setaffinity(0, {core})
    if args.peer is not None:
        os.environ[VARIABLE] = str(args.peer.absolute())
        subprocess.run([os.environ[VARIABLE], "-c", "import kfac_jax"], check=True)
    methods = [METHODS[name] for name in args.method or METHODS]
    if VARIABLE not in os.environ:
        methods = [method for method in methods if not method.name.startswith("kfac_jax")]
    following = missing_at_steps if args.equal_steps else missing
    stop = time.monotonic() + 60 * args.minutes
    for name in args.problem or PROBLEMS:
        problem, record, data = PROBLEMS[name], Record(args.folder / f"{name}.jsonl"), None
        while (key := following(record, methods, problem)) and time.monotonic() < stop:
            data = problem.data() if data is None else data
            line = run_of(problem, METHODS[key.method], data, key)
            record.add(line | ({"shared_machine": True} if args.shared else {}))
            said = line["error"] or f"{line['validation'][-1]} after {line['steps'][-1]} steps"
            print(name, *key, said, flush=True)


if __name__ == "__main__":
    main()
