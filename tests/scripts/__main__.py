"""Train every script by the default, by ``jk.kfac()`` and by Adam, and write the table.

Run: JAX_NUM_CPU_DEVICES=2 python -m tests.scripts [--seeds 2] [--write]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax

import jaxkfac as jk
from tests.scripts import SCRIPTS, end

PAGE = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "scripts.md"
RATES = (1e-3, 3e-3, 1e-2)
OURS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "`jk.kfe_adam(0.01)`": lambda: jk.kfe_adam(0.01),
}
HEAD = f"""Each script of `tests/scripts` is a training as other people write it: its model, loss
and loop are its own. The numbers are the mean loss of the last ten steps, one for each seed; for
the policy, minus the mean return. `default` is `jk.Optimizer(objective)`: `jk.kfac()`, or, for the
density, whose loss has no outputs, `jk.kfe_adam(0.01)`. Adam runs through the same object, for each
script at the best of the rates {", ".join(f"{rate:g}" for rate in RATES)}. Times are CPU
seconds of the whole run of one seed, compilation included. `python -m tests.scripts --write` makes
this table.

| script | at first | default | `jk.kfe_adam(0.01)` | Adam, best rate | CPU s of the three |
|---|---|---|---|---|---|
"""


def timed(run: Callable[..., list[float]], optimizer: Any, seed: int) -> tuple[list[float], float]:
    begun = time.process_time()
    return run(optimizer, seed), time.process_time() - begun


def row(name: str, seeds: int) -> str:
    run = SCRIPTS[name]
    ends: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    first = []
    for label, build in OURS.items():
        runs = [timed(run, build(), seed) for seed in range(seeds)]
        first = first or [losses[0] for losses, _ in runs]
        ends[label], seconds[label] = [end(losses) for losses, _ in runs], runs[0][1]
    adam = {rate: [timed(run, optax.adam(rate), seed) for seed in range(seeds)] for rate in RATES}
    best = min(RATES, key=lambda rate: sum(end(losses) for losses, _ in adam[rate]))
    shown = lambda numbers: ", ".join(f"{x:.3g}" for x in numbers)
    times = [*seconds.values(), adam[best][0][1]]
    return (
        f"| {name} | {shown(first)} | {' | '.join(shown(x) for x in ends.values())} | "
        f"{shown([end(losses) for losses, _ in adam[best]])} ({best:g}) | "
        f"{', '.join(f'{x:.0f}' for x in times)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--script", action="append", choices=SCRIPTS, help="default: all")
    parser.add_argument("--write", action="store_true", help="write the record, after each row")
    args = parser.parse_args()
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    rows = {name: line for line in lines for name in SCRIPTS if line.startswith(f"| {name} |")}
    for name in args.script or SCRIPTS:
        rows[name] = row(name, args.seeds)
        print(rows[name], flush=True)
        if args.write:
            PAGE.write_text(HEAD + "\n".join(rows[x] for x in SCRIPTS if x in rows) + "\n")


if __name__ == "__main__":
    main()
