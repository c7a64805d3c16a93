"""What ran on a GPU: ``python -m parity_tests.gpu_record`` prints what README says of it.

``--write`` puts it into README. ``--join GPU CPU`` first makes the record of two reports of
``parity_tests.report``: every case with its error on the GPU and on the CPU, or "not run".
``make gpu-check`` does both. Where no GPU has run the record is missing, and README says so.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PARITY, OVERLAP = RESULTS / "parity-gpu.json", RESULTS / "overlap-gpu.json"
README = ROOT / "README.md"
# Indented, so that they belong to the items of the list before them and do not end it.
BEGIN, END = (
    "  <!-- python -m parity_tests.gpu_record --write -->\n",
    "  <!-- end of what ran -->\n",
)
NOT_RUN = "not run"
CPU = ("date", "python", "jax", "torch", "numpy", "device")  # circumstances of the CPU's errors
Record = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--join", nargs=2, metavar=("GPU", "CPU"), type=Path, help="two reports")
    parser.add_argument("--write", action="store_true", help="write record and README")
    arguments = parser.parse_args()
    parity, overlap = _read(PARITY), _read(OVERLAP)
    if arguments.join:
        gpu, cpu = map(_read, arguments.join)
        if gpu is None or not gpu["cases"]:
            print(f"{arguments.join[0]} has no case of a GPU: the record stays as it was")
            return 1
        parity = joined(gpu, cpu)
    if not arguments.write:
        print(limit(parity, overlap), end="")
        return 0
    if arguments.join and parity:
        PARITY.write_text(text(parity))
    README.write_text(with_limit(README.read_text(), limit(parity, overlap)))
    return 0


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def joined(gpu: Record, cpu: Record | None) -> dict[str, Any]:
    """Every case of either report, with both errors.

    Args:
        gpu: Report whose cases of a GPU count; others in it are left out.
        cpu: Report whose cases of a CPU count, or ``None``. A case of TF32 has its float32 twin.
    """
    errors = {_key(x): x["error"] for x in (cpu or {"cases": []})["cases"] if x["device"] == "cpu"}
    on_gpu = [x for x in gpu["cases"] if x["device"] == "gpu"]
    cases = [{**x, "cpu_error": errors.get(_key(x), NOT_RUN)} for x in on_gpu]
    ran = {_key(x) for x in on_gpu}
    for x in (cpu or {"cases": []})["cases"]:
        if x["device"] == "cpu" and _key(x) not in ran:
            row = {key: x[key] for key in ("part", "name", "problem", "dtype", "tolerance")}
            row |= {"device": "gpu", "error": NOT_RUN, "cpu_error": x["error"], "passed": False}
            cases.append(row)
    of_cpu = {key: cpu[key] for key in CPU if key in cpu} if cpu else NOT_RUN
    return {**gpu, "cpu": of_cpu, "cases": cases}


def _key(case: Record) -> tuple[str, ...]:
    dtype = "float32" if case["dtype"] == "tf32" else case["dtype"]
    return case["part"], case["name"], case["problem"], dtype


def counted(record: Record) -> tuple[int, int]:
    """How many cases ran on the GPU, and how many of them were within their tolerance."""
    ran = [x for x in record["cases"] if x["error"] != NOT_RUN]
    return len(ran), sum(x["passed"] for x in ran)


def limit(parity: Record | None, overlap: Record | None) -> str:
    """The limit that README states, from the records; a line without them claims nothing."""
    if parity is None:
        said = "Nothing has run on a GPU or a TPU."
    else:
        ran, passed = counted(parity)
        steps = f", and {overlap['steps']} steps of one benchmark have run" if overlap else ""
        page = "docs/repository.md#how-far-to-trust-it"
        device = re.sub(r" \d+GB.*", "", parity["device"])  # its memory is no result
        said = (
            f"On one GPU ({device}), {passed:,} of {ran:,} [parity cases]({page}) agree with "
            f"PyTorch{steps}. On a TPU, nothing has run."
        )
    said += " Programs for both are [compiled](docs/accelerators.md): bytes, but no times."
    return textwrap.fill(f"- {said}", 120, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def with_limit(page: str, said: str) -> str:
    """The page with this line between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + said + END + rest.partition(END)[2]


def text(record: Record) -> str:
    """The record as JSON, a line for each case."""
    head = json.dumps({key: record[key] for key in record if key != "cases"}, indent=1)
    lines = ",\n  ".join(json.dumps(case) for case in record["cases"])
    return f'{head[:-2]},\n "cases": [\n  {lines}\n ]\n}}\n'


if __name__ == "__main__":
    sys.exit(main())
