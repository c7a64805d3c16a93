"""Which of the project's functions a measurement entered, and whether they have changed since.

A function is known by its syntax: docstrings, comments, layout and line numbers do not count.
"""

import ast
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "jaxkfac", "torch_ref")
CALLERS = ("benchmarks._documents._claim",)  # they start a measurement, and are no part of it
NOT_RECORDED = "sources not recorded"
CHANGED = "sources changed since"


class Sources(NamedTuple):
    """What a measurement entered.

    Attributes:
        functions: ``"package.module:function"`` or ``"package.module:Class.method"``, sorted.
        digest: Hash of their syntax, and of the constants of their modules that they name.
    """

    functions: tuple[str, ...]
    digest: str


def traced(work: Callable[[], Any]) -> tuple[Any, Sources]:
    """Call it, and note each function of the project that runs, in every thread it starts."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    functions = sorted({name for code in entered if (name := _name(code))})
    return result, Sources(tuple(functions), digest(functions))


def digest(functions: Iterable[str]) -> str:
    """Hash of these functions as they are now; a function that is gone counts as empty."""
    text = "\n".join(f"{name} {_syntax(name)}" for name in functions)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def packed(rows: Mapping[str, Sources]) -> dict[str, Any]:
    """For JSON: all functions once, and the ranges of them that each row entered."""
    functions = sorted({name for sources in rows.values() for name in sources.functions})
    position = {name: i for i, name in enumerate(functions)}
    return {
        "functions": functions,
        "rows": {
            row: {
                "digest": sources.digest,
                "functions": _ranges([position[name] for name in sources.functions]),
            }
            for row, sources in rows.items()
        },
    }


def unpacked(record: Mapping[str, Any]) -> dict[str, Sources]:
    """The inverse of :func:`packed`."""
    functions = record["functions"]
    return {
        row: Sources(tuple(functions[i] for i in _positions(said["functions"])), said["digest"])
        for row, said in record["rows"].items()
    }


def source_marks(record: Mapping[str, Any]) -> dict[str, str]:
    """For each measured row whose functions are not those of today: what the page says of it."""
    sources = unpacked(record["sources"])
    marks = {}
    for row in record["claims"]:
        if row.get("measured") and any(isinstance(row[side], Mapping) for side in ("torch", "jax")):
            if row["name"] not in sources:
                marks[row["name"]] = NOT_RECORDED
            elif digest(sources[row["name"]].functions) != sources[row["name"]].digest:
                marks[row["name"]] = CHANGED
    return marks


def _ranges(positions: list[int]) -> str:
    ends: list[list[int]] = []
    for i in positions:
        if ends and i == ends[-1][1] + 1:
            ends[-1][1] = i
        else:
            ends.append([i, i])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def _positions(ranges: str) -> Iterator[int]:
    for ends in ranges.split():
        first, _, last = ends.partition("-")
        yield from range(int(first), int(last or first) + 1)


class _Module(NamedTuple):
    """Functions and methods by name, and the module's constants."""

    functions: dict[str, ast.AST]
    constants: dict[str, ast.AST]


@functools.cache
def _module(name: str) -> _Module | None:
    path = ROOT.joinpath(*name.split("."))
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    if not files:
        return None
    functions: dict[str, ast.AST] = {}
    constants: dict[str, ast.AST] = {}
    for node in ast.parse(files[0].read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions[node.name] = node
            case ast.ClassDef():
                for member in node.body:
                    if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        functions[f"{node.name}.{member.name}"] = member
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for leaf in ast.walk(target):
                        if isinstance(leaf, ast.Name):
                            constants[leaf.id] = node
    return _Module(functions, constants)


def _name(code: CodeType) -> str | None:
    """The function or method in which this code stands; ``None`` for code of others."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] not in PACKAGES:
        return None
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = _module(name)
    found = code.co_qualname.partition(".<locals>")[0]
    if module is None or name in CALLERS:
        return None
    if found in module.functions:
        return f"{name}:{found}"
    for constant, node in module.constants.items():  # a lambda in a constant
        if node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno):
            return f"{name}:{constant}"
    return None  # a module's or a class's own body, which importing runs


@functools.cache
def _syntax(function: str) -> str:
    name, _, inside = function.partition(":")
    module = _module(name)
    if module is None:
        return ""
    node = module.functions.get(inside) or module.constants.get(inside)
    if node is None:
        return ""
    names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    constants = sorted((names & set(module.constants)) - {inside})
    return " ".join(_normalised(x) for x in (node, *(module.constants[x] for x in constants)))


def _normalised(node: Any) -> str:
    """A dump without docstrings, positions, and fields that are empty."""
    if isinstance(node, list):
        return "[" + ",".join(map(_normalised, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        fields["body"] = node.body[1:] if ast.get_docstring(node) is not None else node.body
    inside = ",".join(f"{name}={_normalised(value)}" for name, value in fields.items())
    return f"{type(node).__name__}({inside})"
