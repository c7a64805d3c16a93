"""Count what can be counted of the inside: files, doors, names, types, and what a call enters.

Run: python -m benchmarks.structure [--json FILE]

Test files are left out. Code lines are lines without comments, docstrings and blank ones. A room
is a package of the first level; an import between rooms is private if a component of the module's
name begins with an underscore. Complexity is ruff's (McCabe). Functions and files are those of
jaxkfac that a call enters whose traces are cached, outside ``jit``.

Circles are of files, and of rooms. Imports inside functions count. Those under ``if TYPE_CHECKING``
do not, nor that each module of a package loads the package's ``__init__`` first, nor modules named
by strings: the index of jaxkfac and the table of commands, both above all that they name.

A file names sums, counts, folding, packing or turns if a name in its code (a variable, attribute,
argument, function or import) contains ``a_sums``, ``g_sums``, ``a_counts``, ``folded`` or
``is_packed``. Comments, docstrings and strings do not count.
"""

import argparse
import ast
import collections
import functools
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from benchmarks._record import stamp, write

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "jaxkfac"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    record = stamp() | house() | sources() | entered() | planned()
    for name, value in record.items():
        print(f"{name}: {value}")
    if arguments.json:
        write(record, arguments.json)
    return 0


# ---------------------------------------------------------------- the house

VAGUE = frozenset(
    "found held own whole known part parts given kept left taken made wanted asked said seen meant "
    "here there rest other others same each apart once word words thing things".split()
)
"""Names that say nothing about the value they are bound to."""
REASONED = ("interception", "kinds", "factors", "curvature")


def house() -> dict[str, Any]:
    """How large the files are, and what they bind."""
    texts = {path: path.read_text() for path in _files()}
    trees = _trees()
    code = {path: _code(text, trees[path]) for path, text in texts.items()}
    lines = {path: len(numbers) for path, numbers in code.items()}
    chapters = [n for path, n in lines.items() if path.name != "__init__.py"]
    application = {path for path in texts if "jobs" in path.parts}
    names = [name for tree in trees.values() for name in _bound(tree)]
    reasoned = [path for path in texts if _room(path) in REASONED]
    comments = sum(len(re.findall(r"^ *# (?!-{16})|\S  # ", texts[p], re.M)) for p in reasoned)
    functions = [
        (_length(node, code[path]), node.name)
        for path, tree in trees.items()
        for node in _walked(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    parameters = [x for tree in trees.values() for x in _parameters(tree)]
    doors = {path.parent.name: _door(tree) for path, tree in trees.items() if _is_index(path)}
    largest = max(doors, key=lambda name: doors[name])
    return {
        "files": len(texts),
        "median code lines": statistics.median(chapters),
        "below 40 code lines, __init__ left out": f"{_share(n < 40 for n in chapters)}",
        "library, code lines / files": _sizes(set(texts) - application, lines),
        "application, code lines / files": _sizes(application, lines),
        "code lines by room": _by_room(lines),
        "files that name sums, counts, folding, packing or turns": _naming(trees, application),
        "circles of files": [len(circle) for circle in circles_of_files(trees)],
        "circles of rooms": [sorted(circle) for circle in circles_of_rooms(trees)],
        "vague names": _share(name.strip("_") in VAGUE for name in names),
        f"comments per 100 code lines, {', '.join(REASONED)}": round(
            100 * comments / sum(lines[path] for path in reasoned), 1
        ),
        "largest door": f"{doors[largest]} names ({largest})",
        "doors of more than 40 names, by the room that alone imports them": _crowded(trees),
        "longest function": "{} code lines ({})".format(*max(functions)),
        "largest complexity": _most_complex(),
        "parameters typed Any, PyTree or not": _share(_says_nothing(x) for x in parameters),
    }


def _share(values: Iterable[bool]) -> str:
    flags = list(values)
    return f"{sum(flags) / len(flags):.1%}"


def _sizes(paths: set[Path], lines: dict[Path, int]) -> str:
    return f"{sum(lines[path] for path in paths)} / {len(paths)}"


def _by_room(lines: dict[Path, int]) -> dict[str, int]:
    """Code lines of each room; modules of jaxkfac itself are one, ``""``."""
    rooms: dict[str, int] = collections.defaultdict(int)
    for path, number in lines.items():
        rooms["" if path.parent == LIBRARY else _room(path)] += number
    return dict(sorted(rooms.items()))


LAYOUT = re.compile("a_sums|g_sums|a_counts|folded|is_packed")
"""Names that say how a factor's sums are kept."""


def _naming(trees: dict[Path, ast.Module], application: set[Path]) -> str:
    files = {path for path, tree in trees.items() if names_layout(tree)}
    return (
        f"{len(files - application)} of the library, {len(files & application)} of the application"
    )


def names_layout(tree: ast.Module) -> bool:
    """Whether a name in the code says how a factor's sums are kept."""
    fields = ("id", "attr", "arg", "name", "asname")
    names = (getattr(node, field, None) for node in _walked(tree) for field in fields)
    return any(isinstance(name, str) and LAYOUT.search(name) for name in names)


def _code(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the code lines of a file."""
    documented = set()
    for node in _walked(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return {
        number
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#") and number not in documented
    }


def _length(node: ast.FunctionDef, code: set[int]) -> int:
    return len(code & set(range(node.lineno, (node.end_lineno or 0) + 1)))


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in _walked(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def _parameters(tree: ast.Module) -> Iterator[ast.arg]:
    for node in _walked(tree):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield from (x for x in arguments if x.arg not in ("self", "cls"))


def _says_nothing(parameter: ast.arg) -> bool:
    return parameter.annotation is None or ast.unparse(parameter.annotation) in ("Any", "PyTree")


def _is_index(path: Path) -> bool:
    return path.name == "__init__.py" and path.parent != LIBRARY


def _door(tree: ast.Module) -> int:
    return len(_names(tree))


def _names(tree: ast.Module) -> list[str]:
    """A package's ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def _crowded(trees: dict[Path, ast.Module]) -> dict[str, dict[str, int]]:
    """For each large door of the library, how many names one room alone imports; ``""`` is none."""
    rooms: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for path, tree in trees.items():
        for node in _walked(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    rooms[node.module or "", alias.name].add(_room(path))
    crowded = {}
    for path, tree in trees.items():
        if _is_index(path) and _room(path) != "jobs" and _door(tree) > 40:
            door = ".".join(path.parent.relative_to(ROOT).parts)
            users = [rooms[door, name] - {_room(path)} for name in _names(tree)]
            single = ("several" if len(x) > 1 else next(iter(x), "") for x in users)
            crowded[door] = dict(collections.Counter(single).most_common())
    return crowded


def circles_of_files(trees: dict[Path, ast.Module]) -> list[set[str]]:
    """Files that import each other when a module is loaded or one of its functions runs."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in trees}
    return circles({name: _edges(name, trees[path], modules) for name, path in modules.items()})


def circles_of_rooms(trees: dict[Path, ast.Module]) -> list[set[str]]:
    """Rooms of ``jaxkfac`` that import each other; the index, which has all of them, is none."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in trees}
    room = lambda name: name.split(".")[1]
    reached: dict[str, set[str]] = collections.defaultdict(set)
    for name, path in modules.items():
        if path.parent != LIBRARY:
            targets = _edges(name, trees[path], modules)
            reached[room(name)] |= {room(x) for x in targets if modules[x].parent != LIBRARY}
    return circles({name: targets - {name} for name, targets in reached.items()})


def circles(imported: Mapping[str, set[str]]) -> list[set[str]]:
    """Names of which each reaches all others, by what each imports."""
    reached = {name: set(targets) for name, targets in imported.items()}
    for middle in reached:  # transitive closure
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    found = {
        frozenset(x for x in reached[name] if name in reached.get(x, ())) | {name}
        for name in reached
        if any(x != name and name in reached.get(x, ()) for x in reached[name])
    }
    return [set(circle) for circle in found]


def _edges(name: str, tree: ast.Module, modules: Mapping[str, Path]) -> set[str]:
    """Modules that a module imports; a name from a package's door is the package's ``__init__``."""
    edges = set()
    for module, alias in imports(tree):
        candidates = (f"{module}.{alias}", f"{module}.{alias}.__init__", module)
        candidates += (f"{module}.__init__",)
        edges |= {next((x for x in candidates if x in modules), name)}
    return edges - {name}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of each import, those inside functions included.

    Imports under ``if TYPE_CHECKING`` are left out: no run makes them.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(ast.Module([other], []))
        else:
            yield from imports(node)


def _ruff() -> str:
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise SystemExit(
            f"ruff counts the complexity, and is neither {beside} nor on PATH: pip install ruff"
        )
    return found


def _most_complex() -> str:
    options = ["--config", "lint.mccabe.max-complexity=1", "--output-format", "json", "--exit-zero"]
    listed = subprocess.run(
        [_ruff(), "check", "--select", "C901", "--no-cache", *options, *map(str, _files())],
        capture_output=True,
        check=True,
    )
    messages = (entry["message"] for entry in json.loads(listed.stdout))
    found = (re.match(r"`(\w+)` is too complex \((\d+) ", message) for message in messages)
    complexity, name = max((int(match[2]), match[1]) for match in found if match)
    return f"{complexity} ({name})"


# ---------------------------------------------------------------- sources


def sources() -> dict[str, Any]:
    """What the text of the library says."""
    trees = _trees()
    between = [module for path, tree in trees.items() for module in _imports(path, tree)]
    kinds = {path: found for path, tree in trees.items() if (found := _comparisons(tree))}
    names = collections.Counter(
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return {
        "imports between rooms": len(between),
        "of private modules": sum("._" in f".{module}" for module in between),
        "comparisons of a layer's kind with a string": sum(kinds.values()),
        "in files": len(kinds),
        "class names of more than one class": sorted(n for n, k in names.items() if k > 1),
    }


def _files() -> Iterator[Path]:
    for path in sorted(LIBRARY.rglob("*.py")):
        if not path.name.endswith("_test.py") and path.name != "conftest.py":
            yield path


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in _files()}


@functools.cache
def _walked(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def _room(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0]


def _imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """Modules of other rooms that a file imports from."""
    for node in _walked(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxkfac."):
            module = (node.module or "").removeprefix("jaxkfac.")
            first = module.split(".")[0]
            if not first.startswith("_") and first != _room(path):
                yield module


KINDS = ("dense", "conv", "embedding", "scale", "bias", "diagonal")  # jaxkfac/kinds, by name


def _comparisons(tree: ast.Module) -> int:
    """Of ``kind`` or ``.kind`` with the name of a kind, or with several."""

    def is_kind(node: ast.expr) -> bool:
        return getattr(node, "attr", getattr(node, "id", "")) == "kind"

    def is_text(node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.Set | ast.List):
            return all(is_text(x) for x in node.elts)
        return isinstance(node, ast.Constant) and node.value in KINDS

    compared = [
        [node.left, *node.comparators] for node in _walked(tree) if isinstance(node, ast.Compare)
    ]
    matched = [
        [node.subject, *(p.value for c in node.cases for p in ast.walk(c.pattern) if _is_value(p))]
        for node in _walked(tree)
        if isinstance(node, ast.Match)
    ]
    return sum(any(map(is_kind, x)) and any(map(is_text, x)) for x in [*compared, *matched])


def _is_value(pattern: ast.AST) -> TypeGuard[ast.MatchValue]:
    return isinstance(pattern, ast.MatchValue)


# ---------------------------------------------------------------- what calls enter


def entered() -> dict[str, str]:
    """``functions / files`` of three calls."""
    import jax
    import jax.numpy as jnp

    import jaxkfac as jk

    params = {
        name: {"kernel": jax.random.normal(jax.random.key(i), (4, 4)), "bias": jnp.zeros(4)}
        for i, name in enumerate("abc")
    }

    def apply_fn(params: Any, x: Any) -> Any:
        for layer in params.values():
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return x

    batch = (jnp.ones((8, 4)), jnp.zeros(8, jnp.int32))
    stats = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))
    _, grads, factors = stats(params, batch)
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, batch), damping=1e-3)
    state = tx.init(params)
    update = lambda: tx.update(grads, state, params, factors=factors)
    profile = _Profile()
    with jk.HostCurvature(decay=0.9, refresh_every=100, lag=1) as service:
        steps = iter(range(1000))

        def push() -> None:
            service.push(factors, next(steps))
            service.flush()

        return {
            "value_grad_and_factors": profile.entered(lambda: stats(params, batch)),
            "kfac.update": profile.entered(update),
            "push and flush": profile.entered(push),
            "push and flush, with its threads": profile.entered(push, threads=True),
        }


def planned() -> dict[str, str]:
    """``files / calls`` of one plan of a small training, at its second call."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxkfac as jk

    params = {
        name: {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)} for name in ("up", "down")
    }

    def apply_fn(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]

    batch = (jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32))
    objective = jk.Objective(apply_fn, jk.Categorical())

    def plan() -> None:
        jk.plan_memory(
            objective, params, batch, optimizer=optax.adam(1e-3), device_bytes=1e9, compiled="none"
        )

    plan()
    calls, entered = 0, set()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(str(LIBRARY)):
            calls += 1
            entered.add(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        plan()
    finally:
        sys.setprofile(None)
    return {"plan_memory": f"{len(entered)} files / {calls} calls"}


class _Profile:
    """Records which functions of the library this thread and those started since then enter."""

    def __init__(self) -> None:
        self._functions: set[tuple[str, str, int]] = set()
        self._threads = False
        threading.setprofile(self)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        here = self._threads or threading.current_thread() is threading.main_thread()
        if event == "call" and here and code.co_filename.startswith(str(LIBRARY)):
            self._functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def entered(self, call: Callable[[], Any], *, threads: bool = False) -> str:
        """``functions / files`` of a second call, with those of other threads or without."""
        call()
        self._functions, self._threads = set(), threads
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
        return _counted(self._functions)


def _counted(functions: set[tuple[str, str, int]]) -> str:
    named = {x for x in functions if not x[1].endswith(("<lambda>", "<genexpr>", "<listcomp>"))}
    return f"{len(named)} functions / {len({x[0] for x in named})} files"


if __name__ == "__main__":
    sys.exit(main())
