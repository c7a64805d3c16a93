"""Find branches on sizes, dtypes, devices and counts in a module, and let them note their sides."""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ATTRIBUTES = {
    *("shape", "ndim", "size", "dtype", "itemsize", "nbytes", "platform", "device", "devices"),
    *("sharding", "mesh", "memory_kind", "axis_sizes", "strides", "kernel_size"),
}
CALLS = {"len", "issubdtype", "device_count", "default_backend", "can_cast", "promote_types"}
WORDS = re.compile(
    r"(^|_)(n|m|k|rows?|cols?|columns?|sides?|width|dims?|sizes?|counts?|num|dtypes?|devices?|"
    r"ranks?|every|bytes|dense|steps?|terms|panels?|chunks?|blocks?|batch|examples?|features|"
    r"entries|axis|axes|length|lengths|groups?|repeats|stride|period|limit|max|min)($|_)"
)
BRANCHING = {"where", "cond", "select", "switch"}

# Goes into the copy as jaxkfac/_sides.py.
RECORDER = '''"""Note which side of each condition is taken, and by which tests, in their order."""

import atexit
import json
import os

SIDES = {}


def side(key, value):
    try:
        taken = str(bool(value))
    except Exception:
        taken = "traced"
    note(key, taken)
    return value


def note(key, taken):
    tests = SIDES.setdefault(key, {}).setdefault(taken, {})
    tests.setdefault(os.environ.get("PYTEST_CURRENT_TEST", "import").split(" (")[0])


@atexit.register
def write():  # a file for each process, as tests start others
    with open(f"{os.environ['JAXKFAC_SIDES']}.{os.getpid()}", "w") as file:
        json.dump(SIDES, file)
'''


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition in a function.

    Attributes:
        path: The module's file, from the project's root.
        function: Its qualified name.
        source: The condition, or the subject of a ``match``.
        form: ``"if"``, ``"match"`` with its number of cases, or ``"call"`` (where, cond).
        cases: How many a ``match`` has.
        repeat: How many equal conditions stand before it in the function.
        refuses: Whether its true side does nothing but raise an error.
    """

    path: str
    function: str
    source: str
    form: str
    cases: int = 0
    repeat: int = 0
    refuses: bool = False

    @property
    def key(self) -> str:
        """Without a line number; the n-th of equal conditions in one function has its number."""
        again = f" #{self.repeat + 1}" if self.repeat else ""
        return f"{self.path}:{self.function}: {self.source}{again}"

    def sides(self, found: Mapping[str, str]) -> list[str]:
        """The sides that it has; those of a call are known when it ran."""
        if self.form == "match":
            return [f"case {i + 1}" for i in range(self.cases)]
        return ["traced"] if "traced" in found else ["True", "False"]

    def missing(self, sides: Mapping[str, Mapping[str, str]]) -> list[str]:
        """The sides that no case takes. An error is for tests of errors, not for these."""
        found = sides.get(self.key, {})
        errors = {"True"} if self.refuses else set()
        return [side for side in self.sides(found) if side not in errors | set(found)]


def conditions(path: Path, text: str) -> list[Condition]:
    """All of a module, in the order of lines."""
    return [condition for _, condition in _found(str(path), ast.parse(text))]


def instrumented(path: Path, text: str) -> str:
    """The module, with each of its conditions in a call that notes it."""
    tree = ast.parse(text)
    for node, condition in list(_found(str(path), tree)):
        if isinstance(node, ast.Match):
            for i, case in enumerate(node.cases):
                case.body.insert(
                    0, ast.Expr(_call("note", condition.key, ast.Constant(f"case {i + 1}")))
                )
        elif isinstance(node, ast.Call):
            node.args[0] = _call("side", condition.key, node.args[0])
        elif isinstance(node, ast.comprehension):
            node.ifs = [_call("side", condition.key, _all(node.ifs))]
        else:
            node.test = _call("side", condition.key, node.test)  # type: ignore[attr-defined]
    _import(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


def _all(tests: list[ast.expr]) -> ast.expr:
    return tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)


def _call(function: str, key: str, value: ast.expr) -> ast.Call:
    module = ast.Name("_the_sides", ast.Load())
    return ast.Call(ast.Attribute(module, function, ast.Load()), [ast.Constant(key), value], [])


def _import(tree: ast.Module) -> None:
    first = 0
    for i, node in enumerate(tree.body):
        is_words = i == 0 and ast.get_docstring(tree) is not None
        if is_words or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            first = i + 1
    names = [ast.alias("_sides", "_the_sides")]
    tree.body.insert(first, ast.ImportFrom("jaxkfac", names, 0))


def _found(path: str, tree: ast.Module) -> Iterator[tuple[ast.AST, Condition]]:
    counts: dict[str, int] = {}
    for node, function in _walk(tree, ""):
        match node:
            case ast.If() | ast.While() | ast.IfExp():
                tested, form, cases = node.test, "if", 0
            case ast.comprehension() if node.ifs:
                tested, form, cases = _all(node.ifs), "if", 0
            case ast.Match():
                tested, form, cases = node.subject, "match", len(node.cases)
            case ast.Call() if _name(node.func) in BRANCHING and node.args:
                if isinstance(node.args[0], ast.Starred):
                    continue
                tested, form, cases = node.args[0], "call", 0
            case _:
                continue
        if not function or not _of_a_size(tested):
            continue
        refuses = isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        condition = Condition(path, function, ast.unparse(tested), form, cases, 0, refuses)
        repeat = counts.get(condition.key, 0)
        counts[condition.key] = repeat + 1
        yield node, dataclasses.replace(condition, repeat=repeat)


def _walk(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = f"{function}.{child.name}".lstrip(".")
        yield child, function
        yield from _walk(child, inside)


def _name(function: ast.expr) -> str:
    match function:
        case ast.Attribute():
            return function.attr
        case ast.Name():
            return function.id
    return ""


def _of_a_size(tested: ast.expr) -> bool:
    """Whether a size, a dtype, a device or a count decides."""
    for node in ast.walk(tested):
        match node:
            case ast.Attribute(attr=attribute) if attribute in ATTRIBUTES:
                return True
            case ast.Call() if _name(node.func) in CALLS:
                return True
            case ast.Compare():
                names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
                names |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
                is_none = any(
                    isinstance(x, ast.Constant) and x.value is None for x in node.comparators
                )
                if not is_none and any(WORDS.search(name.lower()) for name in names):
                    return True
    return False
