"""One-line mutants of a source file, by ``ast``.

Left alone: docstrings, annotations, decorators, imports, assertions (``zip(strict=True)`` is one),
what is raised, warned, printed or logged, and the text of ``repr``.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple


def _pairs(text: str) -> dict[str, str]:
    pairs = [pair.split() for pair in text.split(",")]
    return dict(pairs) | {b: a for a, b in pairs}


COMPARISONS = _pairs("Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn")
ARITHMETIC = _pairs("Add Sub, Mult Div, BitAnd BitOr, LShift RShift")
ARITHMETIC |= {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult"}
NEIGHBOUR = _pairs(
    "sum mean, max min, maximum minimum, any all, zeros ones, zeros_like ones_like, sqrt square, "
    "floor ceil, sin cos, log exp"
)
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
        if node.lineno != node.end_lineno or new == f"({ast.unparse(node)})":
            continue
        row = rows[node.lineno - 1].encode()  # columns of ast are bytes
        after = row[: node.col_offset] + new.encode() + row[node.end_col_offset :]
        found.add(Mutant(node.lineno, what, row.decode(), after.decode()))
    return sorted(found)


def _changes(node: Any, returns: Any = ()) -> Iterator[tuple[Any, Any, str]]:
    """Each node with a replacement, and what was done."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        returns = [x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value]
    yield from ((node, new, what) for new, what in _replacements(node))
    if isinstance(node, ast.Return) and node.value:
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
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in TOLD
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "__str__", "__format__")
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.BitOr())):
            return name[0].isupper()
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def _without(rows: list[Any]) -> Iterator[list[Any]]:
    return ([*rows[:i], *rows[i + 1 :]] for i in range(len(rows)))


def _replacements(node: Any) -> Iterator[tuple[Any, str]]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                other = getattr(ast, COMPARISONS[type(op).__name__])()
                yield _with(node, ops=[*ops[:i], other, *ops[i + 1 :]]), "comparison"
        case ast.BinOp(op=op):
            if other := ARITHMETIC.get(type(op).__name__):
                yield _with(node, op=getattr(ast, other)()), "arithmetic"
            if isinstance(op, ast.MatMult | ast.Sub | ast.Div | ast.BitOr):
                yield _with(node, left=node.right, right=node.left), "swapped operands"
        case ast.Constant(value=bool(value)):
            yield repr(not value), "boolean"
        case ast.Constant(value=int(value)):
            yield from ((repr(other), "number") for other in (value + 1, value - 1))
        case ast.Constant(value=float(value)):
            yield repr(2 * value or 1.0), "number"
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield node.operand, "dropped sign or not"
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And()), "and, or"
            for rest in _without(values):
                yield _with(node, values=rest) if rest[1:] else rest[0], "dropped operand"
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body), "swapped branches"
        case ast.Call(func=func, args=args, keywords=keywords):
            for keyword, rest in zip(keywords, _without(keywords), strict=True):
                if keyword.arg not in ("strict", None):
                    yield _with(node, keywords=rest), "dropped keyword"
            key = "attr" if isinstance(func, ast.Attribute) else "id"
            name = getattr(func, key, "")
            alike = all(isinstance(x, ast.Name | ast.Attribute) for x in args[:2])
            if len(args) > 1 and alike and name not in SYMMETRIC:
                yield _with(node, args=[args[1], args[0], *args[2:]]), "swapped arguments"
            if name in NEIGHBOUR:
                yield _with(node, func=_with(func, **{key: NEIGHBOUR[name]})), "another function"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass", "removed statement"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass", "removed statement"
        case ast.Continue() | ast.Break():
            yield "break" if isinstance(node, ast.Continue) else "continue", "break, continue"
