"""The command ``jaxkfac influence`` on SmolLM2: processor time, wall time and peak memory.

``python -m benchmarks.influence --output record.json``: factors from 100 texts of 64 tokens, 500
such texts scored for five queries, in a process of its own. Texts are glosses of WordNet, about
eight to a text; each query is one entry in the form of the texts, of words that are in none.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._record import shown, stamp, write
from jaxkfac.jobs.data.wordnet import WordGloss, load_wordnet

_IN_A_TEXT = 8
STAGES = ("factors", "bases", "scores")


def texts(number: int, num_queries: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts to train on, and queries."""
    entries = load_wordnet()
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(entries))
    chosen = [entries[i] for i in order[: number * _IN_A_TEXT]]
    words = {entry.word for entry in chosen}
    others = [entries[i] for i in order[len(chosen) :] if entries[i].word not in words]
    parts = [chosen[i : i + _IN_A_TEXT] for i in range(0, len(chosen), _IN_A_TEXT)]
    return [_text(part) for part in parts], [_text([entry]) for entry in others[:num_queries]]


def _text(entries: list[WordGloss]) -> str:
    return " ".join(f"{x.word.capitalize()}, a {x.kind}: {x.gloss}." for x in entries)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, from nothing to its report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for kind, rows in zip(
            ("train", "queries"), texts(arguments.texts, arguments.queries), strict=True
        ):
            path = folder / f"{kind}.jsonl"
            path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
            files += [f"--{kind}", str(path)]
        output = folder / "run"
        options = ["--factors-from", str(arguments.factors_from), "--max-length", "64"]
        options += ["--batch-size", str(arguments.batch_size), *arguments.words]
        words = ["influence", *files, *options, "--output", str(output)]
        start, wall = time.time(), time.perf_counter()
        command = [sys.executable, "-m", "jaxkfac", *words]
        subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        ends = [(output / "stages" / stage).stat().st_mtime - start for stage in STAGES]
        found = json.loads((output / "influence.json").read_text())
        return {
            "options": options,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "wall_seconds": time.perf_counter() - wall,
            "wall_seconds_until": dict(zip(STAGES, ends, strict=True)),
            "peak_bytes": found["host_memory"]["peak"],  # the run resets what rusage reads
            "bytes_on_disk": {x: (output / "stages" / x).stat().st_size for x in STAGES},
            "queries": [
                {
                    "text": query["text"],
                    "lost": query["lost"],
                    **{side: [[x["score"], x["text"]] for x in query[side][:2]]
                       for side in ("helpful", "harmful")},
                }
                for query in found["queries"]
            ],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--queries", type=int, default=5)
    parser.add_argument("--factors-from", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("words", nargs="*", help="other options of the command, behind --")
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in ("texts", "queries", "factors_from")}
    record = stamp(model="smollm2", **settings) | measure(arguments)
    shown("influence", {k: record[k] for k in ("cpu_seconds", "wall_seconds", "peak_bytes")})
    write(record, arguments.output)


if __name__ == "__main__":
    main()
