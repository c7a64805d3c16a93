"""Beryllium by ``examples/atoms.py``: energies, time and memory of several optimizers.

Run: python -m benchmarks.atoms --peer ENV/bin/python --json benchmarks/results/atoms-cpu.json
     python -m benchmarks.atoms --figure

Each part is one optimizer and one seed, in a process of its own: kfac-jax with FermiNet's numbers
and momentum 0, Adam, ``jk.kfac`` with the same numbers, adaptive ``jk.kfac``, ``jk.kfe_adam`` and
``jk.spring``. All have the example's network (9,136 parameters), 256 walkers, ten Metropolis moves
a step, 400 steps and float32. A part that the record has is not run again, so that a run that was
stopped goes on; ``--parts adam:0,kfac:1`` runs these alone. The peer is kfac-jax in an environment
of its own, where ``pip install kfac-jax==0.0.8 jax==0.8.1`` has been run; without ``--peer`` its
parts are left out.

``first_step_cpu_s`` is the CPU time of all threads from the first line of the setting to the end of
the first step, compilation and all. ``step_cpu_s`` is the median of later steps, and
``moves_cpu_s`` that of the Metropolis moves alone. ``peak_mb`` is that of the process.
``--figure`` prints the page's table and draws its figure from the record.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._record import stamp, write

EXAMPLE = Path(__file__).parent.parent / "examples" / "atoms.py"
RESULTS = Path(__file__).parent / "results"
RECORD, FIGURE = RESULTS / "atoms-cpu.json", RESULTS / "atoms.svg"
METHODS = {  # and colors of the figure, from kind to kind
    "kfac_jax": ("kfac-jax", "0.5"),
    "adam": ("Adam, 3e-3", "C1"),
    "kfac": ("jk.kfac, the same numbers", "C0"),
    "kfac-adaptive": ("jk.kfac()", "C4"),
    "kfe_adam": ("jk.kfe_adam(1e-2)", "C2"),
    "spring": ('jk.spring(rows="scores")', "C3"),
}
SYSTEM, MOVES, SEEDS = "beryllium", 10, 5


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("atoms_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(method: str, seed: int, steps: int, walkers: int) -> dict[str, Any]:
    """One part, in this process and on one device."""
    begun, atoms = time.process_time(), example()
    system, key, devices = atoms.SYSTEMS[SYSTEM], jax.random.key(seed), jax.devices()[:1]
    start, step = atoms.build(system, method, moves=MOVES, devices=devices)
    state, energies, times = start(key, walkers), [], []
    for number in range(steps):
        before = time.process_time() if number else begun
        state, (energy, *_) = step(state, jax.random.fold_in(key, number))
        energies.append(float(energy[0]))
        times.append(time.process_time() - before)

    def moved(state: Any, key: Any) -> Any:
        batch, *_ = atoms.metropolis(system, state.params, state.walkers, state.width, key, MOVES)
        return batch["walkers"]

    alone = jax.pmap(moved, atoms.AXIS, in_axes=(0, None), devices=devices)
    return part(energies, times, lambda: alone(state, key))


def part(energies: Sequence[float], times: Sequence[float], moves: Any) -> dict[str, Any]:
    """What a process reports; ``benchmarks._kfac_jax_atoms`` does so too."""
    jax.block_until_ready(moves())
    alone = []
    for _ in range(11):
        before = time.process_time()
        jax.block_until_ready(moves())
        alone.append(time.process_time() - before)
    return {
        "energies": [round(x, 5) for x in energies],
        "first_step_cpu_s": times[0],
        "step_cpu_s": statistics.median(times[2:] or times),
        "moves_cpu_s": statistics.median(alone),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "jax": jax.__version__,
    }


def summary(parts: dict[str, Any], exact: float) -> dict[str, dict[str, Any]]:
    """For each method the means over its seeds, energies above the exact one in hartree."""
    out = {}
    for method in METHODS:
        runs = [run for name, run in parts.items() if name.split(":")[0] == method]
        if not runs:
            continue
        above = [np.asarray(run["energies"]) - exact for run in runs]
        row: dict[str, Any] = {"seeds": len(runs)}
        for step in (100, 200, 400):
            ends = [x[step - 20 : step].mean() for x in above if len(x) >= step]
            row[f"at {step}"] = float(np.mean(ends)) if ends else None
        early = [x[50:100].mean() for x in above if len(x) >= 100]
        row["steps 51 to 100"] = float(np.mean(early)) if early else None
        last = [x[-50:].mean() for x in above]
        row["last 50"] = float(np.mean(last))
        row["error of last 50"] = float(np.std(last, ddof=1) / len(last) ** 0.5) if last[1:] else 0
        row["scatter of last 50"] = float(np.mean([x[-50:].std(ddof=1) for x in above]))
        for name in ("first_step_cpu_s", "step_cpu_s", "moves_cpu_s", "peak_mb"):
            row[name] = statistics.median(run[name] for run in runs)
        out[method] = row
    return out


def command_of(method: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The process of one part."""
    numbers = [str(seed), str(args.steps), str(args.walkers)]
    if method == "kfac_jax":
        return [args.peer, "-m", "benchmarks._kfac_jax_atoms", "train", *numbers]
    return [sys.executable, "-m", "benchmarks.atoms", "--one", method, *numbers]


# ---------------- the table and the figure


def table(record: dict[str, Any]) -> str:
    """Energies above the exact one, in millihartree, and costs, as Markdown."""
    titles = ("steps 51 to 100", "last 50 of 400", "scatter of their steps", "step, CPU ms")
    titles += ("first step, CPU s", "peak, MB")
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for method, row in record["summary"].items():
        last = f"{1e3 * row['last 50']:.0f} ± {1e3 * row['error of last 50']:.0f}"
        cells = [f"{1e3 * row['steps 51 to 100']:.0f}", last]
        cells += [f"{1e3 * row['scatter of last 50']:.0f}"]
        cells += [f"{1e3 * (row['step_cpu_s'] - row['moves_cpu_s']):.0f}"]
        cells += [f"{row['first_step_cpu_s']:.0f}", f"{row['peak_mb']:.0f}"]
        lines.append(f"| {METHODS[method][0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def panel(axis: Any, record: dict[str, Any]) -> None:
    """Energies over steps: running means of 40 steps, the mean over seeds and their range."""
    exact, width = example().SYSTEMS[SYSTEM].exact, 40
    for method, (title, color) in METHODS.items():
        runs = [x["energies"] for key, x in record["parts"].items() if key[:-2] == method]
        means = [np.convolve(x, np.full(width, 1 / width), "valid") for x in runs]
        above = 1e3 * (np.asarray(means) - exact)
        steps, above = np.arange(width, width + above.shape[1])[::4], above[:, ::4]
        axis.plot(steps, above.mean(0), color=color, label=title)
        axis.fill_between(steps, above.min(0), above.max(0), color=color, alpha=0.12, lw=0)
    axis.axhline(0, color="black", lw=1, ls="--")
    axis.set(xlabel="step", ylabel="millihartree above the exact energy", ylim=(-15, 90))
    axis.legend()


def draw(record: dict[str, Any], path: Path) -> None:
    """The panel as a figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from jaxkfac.plot import FIGURE_STYLE  # not where kfac-jax runs

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(4.8, 3.6), layout="constrained")
        panel(figure.subplots(), record)
        # Without a date, the same numbers give the same bytes.
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="the interpreter of an environment with kfac-jax")
    parser.add_argument("--json", type=Path, help="the record, to which parts are added")
    parser.add_argument("--parts", help="such as adam:0,kfac:1; by default all")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--walkers", type=int, default=256)
    parser.add_argument("--figure", action="store_true", help="from the record, without runs")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(args.one[0], *map(int, args.one[1:]))))
        return
    if args.figure:
        record = json.loads(RECORD.read_text())
        print(table(record))
        draw(record, FIGURE)
        return
    record: dict[str, Any] = stamp(parts={})
    if args.json and args.json.exists():
        record = json.loads(args.json.read_text())
    every = [f"{method}:{seed}" for seed in range(SEEDS) for method in METHODS]
    for name in args.parts.split(",") if args.parts else every:
        method, seed = name.split(":")
        if name in record["parts"] or (method == "kfac_jax" and not args.peer):
            continue
        about = stamp(command=command_of(method, int(seed), args)[1:])
        done = subprocess.run(
            command_of(method, int(seed), args),
            env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        record["parts"][name] = json.loads(done.stdout.splitlines()[-1]) | {"about": about}
        record["summary"] = summary(record["parts"], example().SYSTEMS[SYSTEM].exact)
        print(name, record["summary"][method], flush=True)
        write(record, args.json)


if __name__ == "__main__":
    main()
