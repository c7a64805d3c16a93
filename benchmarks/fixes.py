"""Each documented memory fix: peak bytes and time before and after, in PyTorch and in JAX.

Run: python -m benchmarks.fixes [--device cuda] [--cases NAME ...] [--json FILE] [--markdown FILE]

The faults are those of ``torch_ref.unfixed``, each as it was; the fixes are in ``torch_ref``.
Every number comes from a process of its own: a first run that is not counted (it compiles, and
starts thread pools), then the median of a few. Peaks are beyond what was there before the run:
on the CPU resident memory, on a GPU bytes allocated. JAX never resets its peak on a GPU, so
there its number is the highest of all runs, the first included, less what was in use. PyTorch
runs on one thread and XLA on all: compare times before and after, not of the two.

What the documents claim has a column of its own, and so has whether the measurement supports
it: a claim about bytes, if the fix takes away at least a tenth of the peak and 2 MiB; a claim
about time, if it takes away at least a tenth and no run after overlaps with one before; a claim
about synchronisations, if PyTorch's own count of them falls: a Python float that meets a tensor
may be slow, and still waits for nothing. The sizes here are a thousandth of the documents', so
the direction is tested and not their numbers.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from benchmarks._fixes._cases import CASES
from benchmarks._fixes._measure import Framework, Variant, in_fresh_process, measure, sized
from benchmarks._fixes._table import COLUMNS, as_markdown, as_rows, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--runs", type=int, default=3, help="of which the median counts")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # what one process does
    args = parser.parse_args()
    options: dict[str, Any] = {"device": args.device, "runs": args.runs}
    if args.measure:
        print(json.dumps(measure(*args.measure, size=sized(args.size), **options)))
        return 0
    if args.device == "cuda" and not _has_cuda():
        print("--device cuda: PyTorch finds no CUDA here, so nothing is measured")
        return 0
    record = {**_circumstances(), **options, "size": args.size, "cases": []}
    for case in CASES:
        if case.name not in args.cases:
            continue
        print(case.name, file=sys.stderr, flush=True)
        found: dict[str, Any] = {"name": case.name, "fixed": case.fixed, "claim": case.claim}
        found["jax_counterpart"] = case.jax
        for framework in get_args(Framework):
            found[framework] = {
                variant: in_fresh_process(case.name, framework, variant, size=args.size, **options)
                if framework == "torch" or not case.jax.startswith("–")
                else None
                for variant in get_args(Variant)
            }
        found["verdict"] = verdict(case, found["torch"], args.device)
        record["cases"].append(found)
    _show(record)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    if args.markdown:
        args.markdown.write_text(as_markdown(record))
    return 0


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _circumstances() -> dict[str, Any]:
    words = " ".join(sys.argv[1:])
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.fixes {words}".strip(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "jax", "jaxkfac", "safetensors")},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }


def _show(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Documented fixes, before → after", title_justify="left", box=None)
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for row in as_rows(record):
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a file has no width to keep to
        console.width = 180
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
