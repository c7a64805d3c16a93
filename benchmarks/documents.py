"""Every claim and figure of the five documents of memory faults, judged by stated rules.

Run: python -m benchmarks.documents [--counted | --claims NAME ...] [--device cuda] [--write]
or:  python -m benchmarks.documents --page

``torch_ref.unfixed`` has each fault and each remedy as its document shows them. Bytes are those of
storages in PyTorch and of the compiler's plan in JAX; what is about resident memory or time runs
in a process of its own, and wants an idle machine. Arithmetic, shapes and plans are counted, not
measured: ``--counted`` works them and every verdict out anew, in seconds, and leaves measurements
as they were. Without it, all claims are measured, or those that ``--claims`` names.

``--write`` writes ``benchmarks/results/documents.json`` and ``.md`` and the page
``docs/documents.md``; on a GPU ``documents-gpu.json`` and ``.md``. ``--page`` writes the page and
``documents.md`` from the record as it is, without PyTorch: `make site` does.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--claims", nargs="*", metavar="NAME", help="measure these alone")
    which.add_argument("--counted", action="store_true", help="measure nothing: count and judge")
    which.add_argument("--page", action="store_true", help="write the page from the record alone")
    parser.add_argument("--write", action="store_true", help="write the record and the page")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # what one process does
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page:
        _write_pages(_record("cpu"), "cpu")
        return 0
    from benchmarks._documents._claim import Context
    from benchmarks._documents._record import unmeasured
    from benchmarks._documents._sources import traced
    from benchmarks._documents.claims import CLAIMS

    by_name = {claim.name: claim for claim in CLAIMS}
    if arguments.measure:
        name, framework = arguments.measure
        work = lambda: getattr(by_name[name], framework)(Context(arguments.device))
        print(json.dumps(traced(work)[1] if arguments.trace else work()))
        return 0
    if arguments.device == "cuda" and not _has_cuda():
        print("--device cuda: PyTorch finds no CUDA here, so nothing is measured")
        return 0
    unknown = sorted(set(arguments.claims or ()) - set(by_name))
    if unknown:
        parser.error(f"no such claims: {unknown}; there are {sorted(by_name)}")
    before = _record(arguments.device)
    record = _made(before, arguments.device, arguments.claims, counted=arguments.counted)
    for row in record["claims"]:
        if not arguments.claims or row["name"] in arguments.claims:
            print(f"{row['name']}: {row['verdict']}; {row['torch']}, {row['jax']}")
    if arguments.write:
        if missing := unmeasured(record):
            parser.error(f"not measured yet: name them in --claims, too: {' '.join(missing)}")
        _write(record, arguments.device)
    return 0


def _made(
    before: dict[str, Any], device: str, claims: list[str] | None, *, counted: bool
) -> dict[str, Any]:
    from benchmarks._documents._budgets import by_length
    from benchmarks._documents._lessons import LESSONS
    from benchmarks._documents._record import measured, recounted
    from benchmarks._documents.claims import CLAIMS

    if counted:
        return recounted(before, by_length())
    if claims:
        return measured(before, claims, device)
    record = measured({}, [claim.name for claim in CLAIMS], device)
    return {**record, "lessons": [lesson.to_dict(device) for lesson in LESSONS]}


def _file(device: str) -> Path:
    return RESULTS / ("documents.json" if device == "cpu" else "documents-gpu.json")


def _record(device: str) -> dict[str, Any]:
    return json.loads(_file(device).read_text()) if _file(device).exists() else {}


def _write(record: Mapping[str, Any], device: str) -> None:
    _file(device).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    _write_pages(record, device)


def _write_pages(record: Mapping[str, Any], device: str) -> None:
    from benchmarks._documents._sources import source_marks
    from benchmarks._documents._table import page_text, record_text

    marks = source_marks(record)
    _file(device).with_suffix(".md").write_text(record_text(record, marks))
    if device == "cpu":
        (ROOT / "docs" / "documents.md").write_text(page_text(record, marks))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
