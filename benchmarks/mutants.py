"""200 one-line mutants of the core, drawn with seed 0, each run against the tests of its room.

Run: make mutants, which calls python -m benchmarks.mutants RECORD COMMIT in a copy of the commit.

``results/mutants.json`` is the draw. ``results/mutants-again.json`` has the same 200 nodes in
today's code, in the same order: each by its function and line (``place`` says whether the text is
the same), or, if its code was ``deleted``, a mutant of the same room drawn anew. ``first`` are the
tests that killed the node before; they run first, and the tests of the room only if they pass.

What no test has killed and no ``why``, written by hand into the record, explains runs again each
time, where its line still is. Neither mutmut (no seed, no sample) nor cosmic-ray (one command for
all mutants) draws and runs so. Left alone are docstrings, annotations, decorators, imports,
assertions (``strict=True`` is one), what is raised, warned or printed, and the text of ``repr``.
"""

import ast
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).parent / "results" / "mutants.json"
AGAIN = RECORD.with_stem("mutants-again")
ORACLES = [f"tests/{x}_test.py" for x in ("factors_oracle", "constant_rows", "invariants", "nf4")]
ROOMS = {  # sources; folders whose tests run before the oracles
    "linalg": ("linalg/* linalg/spectral/*", "linalg curvature"),
    "kinds": ("kinds/*", "kinds factors curvature/ekfac interception"),
    "masks": (
        "*/_row_masks */_propagate */_axes */_examples */values/_axes",
        "interception factors",
    ),
    "factors": ("factors/* blocks/*", "blocks factors"),
    "curvature": ("curvature/* uses/_damped_gradients uses/_rotated_blocks", "curvature optim"),
    "EKFAC": ("curvature/ekfac/*", "curvature/ekfac"),
    "host": ("curvature/host/*", "curvature/host"),
    "accumulation": ("optim/_multi_steps optim/_accumulators optim/_trees", "optim"),
    "adapters": ("lslora/*", "lslora"),
    "NF4": ("lslora/nf4/*", "lslora/nf4"),
    "planning": ("planning/*", "planning"),
}
PAIRS = (
    "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult Div, BitAnd BitOr, "
    "LShift RShift, Continue Break, sum mean, max min, maximum minimum, any all, zeros ones, "
    "zeros_like ones_like, sqrt square, floor ceil, sin cos, log exp"
)
OTHER = dict(pair.split() for pair in PAIRS.split(", "))
OTHER |= {b: a for a, b in OTHER.items()} | {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult"}
SYMMETRIC = ("isinstance", "issubclass", "max", "min", "maximum", "minimum")
TOLD = ("warn", "print", "debug", "info", "warning", "cast", "isinstance", "TypeVar")


class Mutant(NamedTuple):
    line: int
    what: str
    before: str
    after: str


def mutants(source: str) -> list[Mutant]:
    """Every mutant of one line, by line."""
    rows, found = source.splitlines(), set()
    for node, new, what in _changes(ast.parse(source)):
        new = new if isinstance(new, str) else f"({ast.unparse(new)})"
        if new != f"({ast.unparse(node)})":
            row = rows[node.lineno - 1].encode()  # columns of ast are bytes
            after = row[: node.col_offset] + new.encode() + row[node.end_col_offset :]
            found.add(Mutant(node.lineno, what, row.decode(), after.decode()))
    return sorted(found)


def _changes(node: Any, returns: Any = ()) -> Iterator[tuple[Any, Any, str]]:
    """Each node of one line with a replacement, and what was done."""
    if isinstance(node, ast.FunctionDef):
        returns = [x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value]
    if getattr(node, "lineno", 0) == getattr(node, "end_lineno", 1):
        yield from ((node, new, what) for new, what in _replacements(node))
    if isinstance(node, ast.Return) and node.value and node.value.lineno == node.value.end_lineno:
        yield from ((node.value, x, "another return") for x in returns if x != node.value)
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _left_alone(child):
                    yield from _changes(child, returns)


def _left_alone(node: Any) -> bool:
    match node.value if isinstance(node, ast.Expr) else node:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name)):
            return name in TOLD
        case ast.FunctionDef(name) | ast.keyword(name):
            return name in ("__repr__", "__str__", "__format__", "strict")
        case ast.Assign([ast.Name(name)], ast.BinOp(op=ast.BitOr())):  # an alias of types
            return name[0].isupper()
    return False


def _other(op: ast.AST) -> Any:
    return getattr(ast, OTHER[type(op).__name__])()


def _replacements(node: Any) -> Iterator[tuple[Any, str]]:
    match node:
        case ast.Compare(left, ops, right):
            for i, op in enumerate(ops):
                changed = [*ops[:i], _other(op), *ops[i + 1 :]]
                yield ast.Compare(left, changed, right), "comparison"
        case ast.BinOp(left, op, right):
            if type(op).__name__ in OTHER:
                yield ast.BinOp(left, _other(op), right), "arithmetic"
            if isinstance(op, ast.MatMult | ast.Sub | ast.Div | ast.BitOr):
                yield ast.BinOp(right, op, left), "swapped operands"
        case ast.Constant(bool(value)):
            yield repr(not value), "boolean"
        case ast.Constant(int(value)):
            yield from ((repr(other), "number") for other in (value + 1, value - 1))
        case ast.Constant(float(value)):
            yield repr(2 * value or 1.0), "number"
        case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
            yield operand, "dropped sign or not"
        case ast.BoolOp(op, values):
            yield ast.BoolOp(_other(op), values), "and, or"
            for rest in itertools.combinations(values, len(values) - 1):
                yield ast.BoolOp(op, list(rest)) if rest[1:] else rest[0], "dropped operand"
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body), "swapped branches"
        case ast.Call(func, args, keywords):
            for dropped in (x for x in keywords if x.arg not in ("strict", None)):
                rest = [x for x in keywords if x != dropped]
                yield ast.Call(func, args, rest), "dropped keyword"
            key = "attr" if isinstance(func, ast.Attribute) else "id"
            name = getattr(func, key, "")
            alike = all(isinstance(x, ast.Name | ast.Attribute) for x in args[:2])
            if len(args) > 1 and alike and name not in SYMMETRIC:
                yield ast.Call(func, [args[1], args[0], *args[2:]], keywords), "swapped arguments"
            if name in OTHER:
                other = type(func)(**vars(func) | {key: OTHER[name]})
                yield ast.Call(other, args, keywords), "another function"
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "pass", "removed statement"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "pass", "removed statement"
        case ast.Continue() | ast.Break():
            yield OTHER[type(node).__name__].lower(), "break, continue"


def drawn(
    tree: Path, count: int, seed: int, rooms: Mapping[str, tuple[str, str]] = ROOMS
) -> list[dict[str, Any]]:
    """``count`` lines without replacement, one mutant of each: first what is changed, then how."""
    lines, generator, record = [], random.Random(seed), []
    for room, (sources, _) in rooms.items():
        for path in (p for x in sources.split() for p in sorted(tree.glob(f"jaxkfac/{x}.py"))):
            if not path.name.endswith(("_test.py", "__init__.py")):
                by_line = itertools.groupby(mutants(path.read_text()), lambda x: x.line)
                lines += [(room, str(path.relative_to(tree)), list(found)) for _, found in by_line]
    for room, file, found in generator.sample(lines, count):
        what = generator.choice(sorted({mutant.what for mutant in found}))
        mutant = generator.choice([mutant for mutant in found if mutant.what == what])
        record.append({"room": room, "file": file, **mutant._asdict()})
    return record


def failing(*tests: str) -> str | None:
    """The first test that fails, if one does, slow ones among them; they have an hour."""
    command = ["timeout", "1h", sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider"]
    command += ["-m", "not exhaustive"]
    done = subprocess.run([*command, *tests], capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    if found or done.returncode in (0, 5):  # 5: no test is left, because all are exhaustive
        return found[1] if found else None
    return f"pytest ends with {done.returncode}"


def killed_by(mutant: Mapping[str, Any]) -> str | None:
    """The test that killed it, if one did: beside it, in a room above, or one written since.

    Where it was tried again on a later commit, that result counts alone.
    """
    stages = ("again",) if "again" in mutant else ("beside", "above", "since")
    verdicts = [mutant.get(stage, {}) for stage in stages]
    return next((x["killed_by"] for x in verdicts if x.get("killed_by")), None)


def first_tests(mutant: Mapping[str, Any]) -> list[str]:
    """What killed it on an earlier commit, and is tried before all other tests."""
    killer = killed_by(mutant)
    return mutant.get("first", [killer] if killer else [])


def passing_tests(tests: Sequence[str]) -> set[str]:
    """Those that pass without a mutant: all in one process, or each alone if one of them fails."""
    if not tests or not failing(*tests):
        return set(tests)
    return {test for test in tests if not failing(test)}


def _file_of(mutant: Mapping[str, Any]) -> Path:
    """Its file, also where this has moved to another folder of the same room."""
    path = Path(mutant["file"])
    if path.exists():
        return path
    return next(Path(*path.parts[:2]).rglob(path.name), path)


def _line_of(mutant: Mapping[str, Any]) -> int | None:
    """Which line of its file it changes, from 0: of equal ones the nearest to the recorded one."""
    path = _file_of(mutant)
    rows = path.read_text().split("\n") if path.exists() else []
    at = [i for i, row in enumerate(rows) if row == mutant["before"]]
    return min(at, key=lambda i: abs(i + 1 - mutant["line"]), default=None)


def _failing_with(mutant: Mapping[str, Any], line: int, *tests: str) -> str | None:
    """The first test that fails while the mutant is in its file."""
    path = _file_of(mutant)
    source = path.read_text()
    rows = source.split("\n")
    path.write_text("\n".join([*rows[:line], mutant["after"], *rows[line + 1 :]]))
    try:
        return failing(*tests)
    finally:
        path.write_text(source)


def room_tests(mutant: dict[str, Any]) -> list[str]:
    """The tests of the room that a mutant is in, and the oracles."""
    return [*(f"jaxkfac/{folder}" for folder in ROOMS[mutant["room"]][1].split()), *ORACLES]


def run(
    file: Path,
    commit: str,
    *,
    draw: Callable[[], dict[str, Any]] = lambda: {"seed": 0, "mutants": drawn(Path(), 200, 0)},
    tests_of: Callable[[dict[str, Any]], list[str]] = room_tests,
    again: bool = False,
) -> None:
    """Every mutant that is neither killed nor explained, in the current folder.

    The record is written after each mutant, so that the next call goes on from there.

    Args:
        file: The record; a new one is made from ``draw`` and ``commit``.
        commit: The commit of the current folder.
        draw: Seed and mutants of a new record.
        tests_of: The tests of a mutant, after the ones of its own file.
        again: Whether what a test of an earlier commit killed is tried once more: first with that
            test, and with all of ``tests_of`` if it passes. So it is with a record that says so.
    """
    record: dict[str, Any] = {"commit": commit}
    passing: set[tuple[str, ...]] = set()
    record |= json.loads(file.read_text()) if file.exists() else draw()
    again |= "again" in record
    tried = [x for x in record["mutants"] if "why" not in x and _line_of(x) is not None]
    tried = [x for x in tried if not killed_by(x) or (again and "again" not in x)]
    earlier = sorted({test for x in tried for test in first_tests(x)}) if again else []
    killers = passing_tests(earlier)
    for mutant in tried:
        first, line = first_tests(mutant), _line_of(mutant)
        if line is None:
            continue
        alone = [test for test in first if test in killers]
        failed = _failing_with(mutant, line, *alone) if alone else None
        if not failed:
            tests = tuple(tests_of(mutant))
            if tests not in passing and (without := failing(*tests)):
                sys.exit(f"without a mutant: {without}")
            passing.add(tests)
            path = _file_of(mutant)
            beside = [str(x) for x in path.parent.glob(f"{path.stem}_test.py")]
            failed = _failing_with(mutant, line, *beside, *tests)
        stage = (
            "again" if first or "again" in mutant else "since" if "beside" in mutant else "beside"
        )
        mutant[stage] = {"commit": commit, "killed_by": failed}
        print(f"{mutant['file']}:{line + 1}: {failed or 'SURVIVED'}", flush=True)
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
