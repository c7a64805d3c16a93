"""Count what can be counted of the inside: doors, kinds, names, types, and what a call enters.

Run: python -m benchmarks.structure [--json FILE]

Test files are left out. A room is a package of the first level; an import between rooms is private
if a component of the module's name begins with an underscore. Functions and files are those of
jaxkfac that a call enters whose traces are cached, outside ``jit``.
"""

import argparse
import ast
import collections
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from benchmarks._record import stamp, write

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "jaxkfac"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    record = stamp() | sources() | entered()
    for name, value in record.items():
        print(f"{name}: {value}")
    if arguments.json:
        write(record, arguments.json)
    return 0


# ---------------------------------------------------------------- sources


def sources() -> dict[str, Any]:
    """What the text of the library says."""
    trees = {path: ast.parse(path.read_text()) for path in _files()}
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
        **{f"parameters without a type, {room}": _untyped(room, trees) for room in TYPED},
    }


TYPED = ("factors", "interception")


def _files() -> Iterator[Path]:
    for path in sorted(LIBRARY.rglob("*.py")):
        if not path.name.endswith("_test.py") and path.name != "conftest.py":
            yield path


def _room(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0]


def _imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """Modules of other rooms that a file imports from."""
    for node in ast.walk(tree):
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
        [node.left, *node.comparators] for node in ast.walk(tree) if isinstance(node, ast.Compare)
    ]
    matched = [
        [node.subject, *(p.value for c in node.cases for p in ast.walk(c.pattern) if _is_value(p))]
        for node in ast.walk(tree)
        if isinstance(node, ast.Match)
    ]
    return sum(any(map(is_kind, x)) and any(map(is_text, x)) for x in [*compared, *matched])


def _is_value(pattern: ast.AST) -> TypeGuard[ast.MatchValue]:
    return isinstance(pattern, ast.MatchValue)


def _untyped(room: str, trees: dict[Path, ast.Module]) -> str:
    """Share of parameters annotated ``Any``, or not at all; lambdas cannot be."""
    found: list[bool] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if _room(path) == room and isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                given = [x for x in given if x.arg not in ("self", "cls")]
                found += [x.annotation is None or ast.unparse(x.annotation) == "Any" for x in given]
    return f"{sum(found) / len(found):.1%}"


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
