"""Every claim and figure of the five documents of memory faults: measured, and judged by rules.

Run: python -m benchmarks.documents [--device cuda] [--claims NAME ...] [--write]

``torch_ref.unfixed`` has each fault and each remedy as its document shows them. Bytes are those of
storages in PyTorch and of the compiler's plan in JAX; what is about resident memory or time runs
in a process of its own, and wants an idle machine. ``--write`` writes
``benchmarks/results/documents.json`` and ``.md`` and the page ``docs/documents.md``; on a GPU
``documents-gpu.json`` and ``.md``.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--claims", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--write", action="store_true", help="write the record and the page")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # what one process does
    arguments = parser.parse_args()
    from benchmarks._documents import CLAIMS, Context

    by_name = {claim.name: claim for claim in CLAIMS}
    if arguments.measure:
        name, framework = arguments.measure
        work = getattr(by_name[name], framework)
        print(json.dumps(work(Context(arguments.device))))
        return 0
    if arguments.device == "cuda" and not _has_cuda():
        print("--device cuda: PyTorch finds no CUDA here, so nothing is measured")
        return 0
    if arguments.write and arguments.claims:
        parser.error("--write takes all claims: a part of them is no record")
    unknown = sorted(set(arguments.claims or ()) - set(by_name))
    if unknown:
        parser.error(f"no such claims: {unknown}; there are {sorted(by_name)}")
    names = arguments.claims or list(by_name)
    names += [needed for name in names for needed in by_name[name].needs]
    record = measured(arguments.device, names)
    if arguments.write:
        _write(record, arguments.device)
    return 0


def measured(device: str, names: list[str]) -> dict[str, Any]:
    """Judge the claims of these names, in order, and print each row."""
    from benchmarks._documents import CLAIMS, Context, judge
    from benchmarks._documents._budgets import BUDGETS, compared
    from benchmarks._documents._lessons import LESSONS

    context = Context(device, {})
    rows = {}
    for claim in CLAIMS:
        if claim.name not in names:
            continue
        sides = {name: claim.measure(name, context) for name in ("torch", "jax")}
        rows[claim.name] = row = judge(claim, **sides)
        context = context._replace(rows=dict(rows))
        print(f"{claim.name}: {row.verdict}; {row.torch}, {row.jax}", flush=True)
    whole = len(rows) == len(CLAIMS)
    return {
        **_circumstances(),
        "device": device,
        "claims": [row.to_dict() for row in rows.values()],
        "lessons": [lesson.to_dict(device) for lesson in LESSONS] if whole else [],
        "budgets": [compared(budget) for budget in BUDGETS] if whole else [],
    }


def _write(record: dict[str, Any], device: str) -> None:
    from benchmarks._documents._table import page_text, record_text

    name = "documents" if device == "cpu" else "documents-gpu"
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    (RESULTS / f"{name}.md").write_text(record_text(record))
    if device == "cpu":
        (ROOT / "docs" / "documents.md").write_text(page_text(record))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _circumstances() -> dict[str, Any]:
    words = " ".join(sys.argv[1:])
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.documents {words}".strip(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "jax", "jaxkfac", "safetensors")},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(main())
