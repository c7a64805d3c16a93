"""The few-shot job as a user starts it: accuracy, time, memory, and what accumulation saves.

Run: python -m benchmarks.few_shot [--write] [-- options of examples/fewshot.py]
     python -m benchmarks.few_shot --page

The job and its table of bytes run in processes of their own. CPU time is that of all cores
together; where other programs run beside it, it says more than the time on the wall. --write keeps
the record, results/few_shot.json, and makes results/few_shot.md of it; --page makes the page again
of the record that is there, and measures nothing.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._record import shown, stamp, write

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "fewshot.py"
RESULTS = ROOT / "benchmarks" / "results"


def run(*words: str) -> str:
    """What the example prints."""
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def job(*words: str) -> dict[str, Any]:
    """One whole run: its records, and what it took."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said = run("--output", folder, *words)
        records = json.loads(Path(folder, "records.json").read_text())
    print(said, flush=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    peak = after.ru_maxrss * 1024 / 2**20
    return records | {"seconds": time.monotonic() - started, "cpu_seconds": cpu, "peak_MiB": peak}


def page(record: dict[str, Any]) -> str:
    """The record as a page."""
    found = record["job"]
    command = " ".join(["python examples/fewshot.py", *record["options"]])
    lines = [
        f"Made by `python -m benchmarks.few_shot --write` of `{command}`, {record['date']}, JAX "
        f"{record['jax']}, {record['cores']} cores, load {record['load_before']} before.",
        "",
        f"- accuracy over {found['episodes']} novel episodes {found['novel']:.2%} "
        f"± {found['interval']:.2%}",
        f"- validation by epoch {', '.join(f'{x:.1%}' for x in found['validation'])}",
        f"- {found['seconds']:.0f} s on the wall, {found['cpu_seconds']:.0f} s of CPU time",
        f"- at most {found['peak_MiB']:.0f} MiB resident",
        "",
        "What a compiled step is given and makes on the way, and what accumulation saves of it:",
        "of the same loop without accumulation (as in the documented one, whose batch is one",
        "episode either way), and of one batch of all its episodes.",
        "",
        "```",
        record["bytes"].rstrip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write results/few_shot.json and .md")
    parser.add_argument("--page", action="store_true", help="write results/few_shot.md again")
    parser.add_argument("options", nargs="*", help="of the example, behind --")
    arguments = parser.parse_args()
    if arguments.page:
        record = json.loads((RESULTS / "few_shot.json").read_text())
        (RESULTS / "few_shot.md").write_text(page(record))
        return
    record = stamp(options=arguments.options)
    record["job"] = job(*arguments.options)
    record["bytes"] = run("--bytes", *arguments.options)
    shown("few-shot", record["job"])
    print(record["bytes"])
    if arguments.write:
        write(record, RESULTS / "few_shot.json")
        (RESULTS / "few_shot.md").write_text(page(record))


if __name__ == "__main__":
    main()
