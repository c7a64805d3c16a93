"""One-line mutants of a source file, by ``ast``.

Changed: comparisons, arithmetic, numbers, booleans, ``and`` and ``or``, signs and ``not``; dropped
keywords and operands, swapped arguments and branches, what another branch returns, one function
for its neighbour, removed statements. Left alone: docstrings, annotations, decorators, imports,
assertions (``zip(strict=True)`` is one), what is raised, warned, printed or logged, and the text
of ``repr``.
"""

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NEIGHBOURS = [
    ("sum", "mean"), ("max", "min"), ("maximum", "minimum"), ("any", "all"), ("zeros", "ones"),
    ("zeros_like", "ones_like"), ("sqrt", "square"), ("floor", "ceil"), ("sin", "cos"),
    ("log", "exp"),
]  # fmt: skip
NEIGHBOUR = dict(NEIGHBOURS) | {b: a for a, b in NEIGHBOURS}
SYMMETRIC = ("isinstance", "issubclass", "max", "min", "maximum", "minimum")
TEXT = ("__repr__", "__str__", "__format__")
TOLD = ("warn", "print", "debug", "info", "warning", "cast", "isinstance", "TypeVar")


class Mutant(NamedTuple):
    """``lines`` (from 1, inclusive) are those whose execution can meet the changed one."""

    line: int
    what: str
    before: str
    after: str
    lines: tuple[int, int]


def mutants(source: str) -> list[Mutant]:
    """Every mutant of one line, by line."""
    rows, tree, found = source.splitlines(), ast.parse(source), set()
    for node, new, what, statement in _changes(tree, None):
        if node.lineno != node.end_lineno:
            continue
        if not isinstance(new, str):
            if ast.unparse(new) == ast.unparse(node):
                continue
            new = f"({ast.unparse(new)})"
        row = rows[node.lineno - 1].encode()  # columns of ast are bytes
        after = (row[: node.col_offset] + new.encode() + row[node.end_col_offset :]).decode()
        body = getattr(statement, "body", None)  # of a compound statement only the head
        last = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
        found.add(Mutant(node.lineno, what, row.decode(), after, (statement.lineno, last)))
    return sorted(found)


def _changes(node: Any, statement: Any, returns: Any = ()) -> Iterator[tuple[Any, Any, str, Any]]:
    """Each node with a replacement, what was done, and the statement around it."""
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        returns = [x.value for x in ast.walk(node) if isinstance(x, ast.Return) and x.value]
    for new, what in _replacements(node):
        yield node, new, what, statement
    if isinstance(node, ast.Return) and node.value:
        yield from ((node.value, x, "another return", node) for x in returns if x != node.value)
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _left_alone(child):
                    yield from _changes(child, statement, returns)


def _left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.FunctionDef(name=name):
            return name in TEXT
        case (
            ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))
            | ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)))
        ):
            return name in TOLD
        case ast.Assign(value=ast.BinOp(op=ast.BitOr())):
            return isinstance(node.targets[0], ast.Name) and node.targets[0].id[0].isupper()
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _with(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _replacements(node: Any) -> Iterator[tuple[Any, str]]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield (
                    _with(node, ops=[*ops[:i], COMPARISONS[type(op)](), *ops[i + 1 :]]),
                    "comparison",
                )
        case ast.BinOp(op=op):
            if type(op) in ARITHMETIC:
                yield _with(node, op=ARITHMETIC[type(op)]()), "arithmetic"
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
            for i in range(len(values)):
                rest = [*values[:i], *values[i + 1 :]]
                yield _with(node, values=rest) if rest[1:] else rest[0], "dropped operand"
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body), "swapped branches"
        case ast.Call(func=func, args=args, keywords=keywords):
            for i, keyword in enumerate(keywords):
                if keyword.arg not in ("strict", None):
                    rest = [*keywords[:i], *keywords[i + 1 :]]
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
