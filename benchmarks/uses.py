"""Influence and Laplace beside peers, each in an environment and in processes of its own.

``python -m benchmarks.uses --kronfluence ENV/bin/python --json FILE``, and likewise ``--laplace``
(laplace-torch) and ``--laplax``. Every job reads the same weights and data, and says how long its
stages took, compiling included; the parent sees the peak of its memory. In float64 on small
problems the results are compared number by number, in float32 the jobs are timed; ``--equal``
leaves the latter out, and ``--examples`` takes fewer. ``benchmarks/_uses/peers`` has a file for
each peer.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._record import shown, stamp, write
from benchmarks._uses import problems
from benchmarks._uses.jobs import TOLERANCE, difference, job, ours, ratios, theirs
from benchmarks._uses.problems import Problem

LAPLACE = ["probit", "variance", "bridge"]
STORE: dict[str, Any] = {"keep": False, "store": "bfloat16"}
FEW = 100  # examples, where compiling is most of the time
Commands = tuple[list[str], list[str]]


def compared(
    commands: Commands, problem: Problem, *, file: Path | None = None, **settings: Any
) -> dict[str, float]:
    """The differences of two jobs in float64, if they are equal.

    Args:
        commands: Ours, and the peer's.
        problem: The problem.
        file: Where the problem and what the peer found are kept.
        settings: Of both jobs.
    """
    (_, found), (_, expected) = (job(c, problem, "float64", **settings) for c in commands)
    worst = difference(found, expected)
    shown(f"{problem.kind}, relative difference", {k: f"{x:.1e}" for k, x in worst.items()})
    if max(worst.values()) > TOLERANCE:
        raise SystemExit(f"{problem.kind}: {worst} is more than {TOLERANCE}")
    if file is not None:
        found = {f"found/{name}": x for name, x in expected.items()}
        np.savez(file, **problem.arrays("float64"), **found)
    return worst


def timed(commands: Commands, problem: Problem, peer: str, **settings: Any) -> dict[str, Any]:
    """Both jobs in float32, ours over theirs."""
    both = [job(c, problem, "float32", **settings) for c in commands]
    (one, _), (other, _) = both
    found = {"ours": one, peer: other, "ratios": ratios(one, other)}
    shown(f"{problem.kind}, ours over {peer}", found["ratios"])
    if problem == problems.FULL_TIMED:
        # The blocks leave out what layers have to do with each other, so that they differ.
        x, y = (np.trace(said["variance"], axis1=1, axis2=2) for _, said in both)
        found["variance"] = {
            "ratio of means": float(x.mean() / y.mean()),
            "correlation": float(np.corrcoef(x, y)[0, 1]),
        }
        shown("its variance", found["variance"])
    return found


def beside_kronfluence(python: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Covariances, lambdas, pairwise and self scores, and scores of another measurement."""
    commands = ours("influence"), theirs(python, "kronfluence_influence")
    kinds, record = arguments.problems, {"equal": {}, "timed": {}}
    for kind in kinds:
        equal = problems.INFLUENCE_EQUAL[kind]
        record["equal"][kind] = compared(commands, equal, keep=True, margin=True)
    for kind in [] if arguments.equal else kinds:
        problem = sized(problems.INFLUENCE_TIMED[kind], arguments.examples)
        record["timed"][kind] = timed(commands, problem, "kronfluence", keep=False)
        if kind == "transformer":
            record["floor"] = floor(problem, record["timed"][kind])
            record["store"] = {}
            for number in sorted({problem.examples, min(FEW, problem.examples)}):
                some = problem._replace(examples=number)
                peer, found = job(commands[1], some, "float32", keep=False)
                record["store"][str(number)] = {
                    "kronfluence": peer,
                    **stored(some, peer, found),
                }
    return record


def stored(problem: Problem, theirs: dict[str, Any], scores: Any) -> dict[str, Any]:
    """Scores from a store of gradients, cold and with a warm compile cache, over kronfluence.

    Args:
        problem: The problem.
        theirs: What kronfluence's job of it took.
        scores: Its scores, with which ours are correlated.
    """
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        files = {"folder": str(Path(folder, "store"))}
        rows = {  # the second one fills the cache
            "cold": ({}, {}),
            "filling": (cache, {}),
            "warm": (cache, {}),
            "warm, in files": (cache, files),
        }
        for name, (environment, place) in rows.items():
            settings = STORE | place
            one, found = job(
                ours("influence"), problem, "float32", environment=environment, **settings
            )
            said[name] = {"ours": one, "ratios": store_ratios(one, theirs)}
            shown(f"{problem.examples} examples, a store, {name}", said[name]["ratios"])
    said["correlation"] = {
        name: float(np.corrcoef(found[name].ravel(), scores[name].ravel())[0, 1]) for name in found
    }
    shown("its scores, correlation with kronfluence's", said["correlation"])
    return said


def store_ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Processor time over that of the other's stages; of new queries over our own."""
    cpu, theirs = ({k: x for k, (_, x) in said["seconds"].items()} for said in (one, other))
    new = cpu.pop("new queries")
    return {
        "cpu": sum(cpu.values()) / sum(theirs.values()),
        "new queries": new / sum(cpu.values()),
        "peak": one["peak_bytes"] / other["peak_bytes"],
    }


def floor(problem: Problem, found: dict[str, Any]) -> dict[str, Any]:
    """What four backward passes and their products take in plain JAX, and the gradient's memory."""
    whole, alone = (job(ours("floor"), problem, "float32", alone=x)[0] for x in (False, True))
    cpu = {stage: seconds for stage, (_, seconds) in whole["seconds"].items()}
    passes = 4 * (cpu["compile backward"] + cpu["backward"])
    products = cpu["covariances"] + 2 * cpu["rotated"] + cpu["scored"]
    theirs = found["kronfluence"]
    total = sum(seconds for _, seconds in theirs["seconds"].values())
    said = {
        "cpu_seconds": passes + products,
        "peak_bytes": alone["peak_bytes"],
        "cpu": (passes + products) / total,
        "peak": alone["peak_bytes"] / theirs["peak_bytes"],
    }
    shown("floor over kronfluence", {key: said[key] for key in ("cpu", "peak")})
    return {"stages": whole["seconds"], **said}


def beside_laplace_torch(python: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit, evidence, and the predictive by Jacobians; biases in blocks of their own."""
    commands = ours("posterior"), theirs(python, "laplace_torch")
    settings = {"bias": "separate", "prior_precision": 3.0}
    file = None if arguments.keep is None else arguments.keep / "found.npz"
    equal = compared(commands, problems.LAPLACE_EQUAL, file=file, wanted=LAPLACE, **settings)
    record = {"equal": equal}
    if not arguments.equal:
        problem = sized(problems.LAPLACE_TIMED, arguments.examples)
        record["timed"] = timed(commands, problem, "laplace-torch", wanted=LAPLACE[:1], **settings)
    return record


def beside_laplax(python: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Covariances of outputs. One linear layer has one block, so that it is the full matrix."""
    commands = ours("posterior"), theirs(python, "laplax_posterior")
    settings = {"bias": "joint", "prior_precision": 3.0, "wanted": ["variance"]}
    record = {"equal": compared(commands, problems.FULL_EQUAL, **settings)}
    if not arguments.equal:
        record["timed"] = timed(commands, problems.FULL_TIMED, "laplax", **settings)
    return record


PEERS = {
    "kronfluence": beside_kronfluence,
    "laplace": beside_laplace_torch,
    "laplax": beside_laplax,
}


def sized(problem: Problem, examples: int | None) -> Problem:
    """The problem with fewer examples."""
    return problem if examples is None else problem._replace(examples=examples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in PEERS:
        parser.add_argument(f"--{name}", type=Path, help="the Python of an environment with it")
    kinds = list(problems.INFLUENCE_EQUAL)
    parser.add_argument("--problems", nargs="*", default=kinds, choices=kinds, help="of influence")
    parser.add_argument("--examples", type=int, help="of what is timed")
    parser.add_argument("--equal", action="store_true", help="time nothing")
    parser.add_argument("--keep", type=Path, help="a folder for laplace-torch's results, for tests")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record = stamp()
    for name, beside in PEERS.items():
        if (python := getattr(arguments, name)) is not None:
            record[name] = beside(python, arguments)
    write(record, arguments.json)


if __name__ == "__main__":
    main()
