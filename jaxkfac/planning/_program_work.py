"""What the text of a compiled program says of libraries and of communication, on one device."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxkfac.curvature import solver_scratch

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"c128": 16, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "f32": 4, "s32": 4, "u32": 4}
_BYTES |= {"bf16": 2, "f16": 2, "s16": 2, "u16": 2}  # one of others
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
# An asynchronous collective is a pair; the second half has the shapes of the result.
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start|-done)?\(")
_SOLVE = re.compile(r" = (.*?) custom-call\(.*custom_call_target=\"[^\"]*(syev|potrf|cholesky)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Solve(NamedTuple):
    """Matrices of one size solved by one call."""

    kind: str  # "eigh" or "cholesky"
    batch: int
    n: int
    itemsize: int

    @property
    def scratch(self) -> int:
        """Bytes by the formula of the page; a Cholesky factor needs none in LAPACK."""
        if self.kind == "cholesky":
            return 0
        return solver_scratch(self.n, self.batch, self.itemsize)


class Work(NamedTuple):
    """What one device is asked for in one run.

    Attributes:
        solves: How often each call is made.
        calls: Collectives by kind; those in a loop as often as it turns.
        bytes: Of their results, likewise.
        libraries: Calls of cuDNN.
    """

    solves: Counter[Solve]
    calls: Counter[str]
    bytes: Counter[str]
    libraries: int

    def plus(self, other: "Work", times: int = 1) -> "Work":
        """Both, the other so many times."""
        counters: list[Any] = [
            mine + Counter({key: times * count for key, count in theirs.items()})
            for mine, theirs in zip(self[:3], other[:3], strict=True)
        ]
        solves, calls, nbytes = counters
        return Work(solves, calls, nbytes, self.libraries + times * other.libraries)

    @property
    def cubes(self) -> int:
        """Sum of the cubes of the sizes of all matrices solved."""
        return sum(times * solve.batch * solve.n**3 for solve, times in self.solves.items())


NOTHING = Work(Counter(), Counter(), Counter(), 0)


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes of what collectives return on each device, by kind; see :func:`program_work`."""
    return {kind: found["bytes"] for kind, found in program_work(text)["collectives"].items()}


def program_work(text: str) -> dict[str, Any]:
    """What a program asks of libraries and of other devices; figures are of one device.

    Of the branches of a conditional the one that solves most counts, so where each device takes
    a branch of its own these are the figures of the busiest. A loop counts as often as it
    turns, where the compiler knows it. Solves follow one another: the largest scratch counts.
    """
    bodies, entry = _computations(text)
    work = _work(entry, bodies, {})
    matrices: Counter[tuple[str, int]] = Counter()
    for solve, times in work.solves.items():
        matrices[solve.kind, solve.n] += times * solve.batch
    sizes = sorted(matrices.items(), key=lambda item: (item[0][0] != "eigh", -item[0][1]))
    return {
        "scratch": max((solve.scratch for solve in work.solves), default=0),
        "solves": [
            f"{count} x {n}" if kind == "eigh" else f"{kind} {count} x {n}"
            for (kind, n), count in sizes
        ],
        "cubes": work.cubes,
        "cudnn_calls": work.libraries,
        "collectives": {
            kind: {"count": work.calls[kind], "bytes": work.bytes[kind]}
            for kind in COLLECTIVES
            if work.calls[kind]
        },
    }


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of each computation, and the name of the one that is run."""
    bodies: dict[str, list[str]] = {}
    entry, own = "", []
    for line in text.splitlines():
        if found := _HEAD.match(line):
            own = bodies[found[2]] = []
            entry = found[2] if found[1] else entry
        else:
            own.append(line)
    return bodies, entry


def _work(name: str, bodies: Mapping[str, list[str]], known: dict[str, Work]) -> Work:
    if name not in known:
        total = NOTHING
        for line in bodies.get(name, ()):
            total = total.plus(_of_line(line))
            turns = int(found[1]) if (found := _TRIPS.search(line)) else 1
            for called in [] if "-done(" in line else _CALLED.findall(line):
                total = total.plus(_work(called, bodies, known), turns)
            several = _BRANCHES.search(line)
            branches = several[1].replace("%", "").split(", ") if several else []
            ways = [_work(way, bodies, known) for way in branches or _TWO_BRANCHES.findall(line)]
            if ways:
                total = total.plus(max(ways, key=lambda w: (w.cubes, sum(w.bytes.values()))))
        known[name] = total
    return known[name]


def _of_line(line: str) -> Work:
    found = _COLLECTIVE.search(line)
    if found and found[3] != "-start":
        return NOTHING._replace(
            calls=Counter([found[2]]), bytes=Counter({found[2]: _size(found[1])})
        )
    if found := _SOLVE.search(line):
        (dtype, shape), kind = _SHAPE.findall(found[1])[0], found[2]
        *batch, n, _ = map(int, shape.split(","))
        solve = Solve("eigh" if kind == "syev" else "cholesky", math.prod(batch), n, _BYTES[dtype])
        return NOTHING._replace(solves=Counter([solve]))
    return NOTHING._replace(libraries="custom-call" in line and "__cudnn" in line)


def _size(types: str) -> int:
    """Bytes of the arrays of a type, a tuple perhaps."""
    return sum(
        _BYTES.get(dtype, 1) * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape in _SHAPE.findall(types)
    )
