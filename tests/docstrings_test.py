"""Every ``>>>`` example in a docstring of the library runs and prints what it says.

Docstrings are read from the source, so none is missed because a decorator hides it. An example
sees its module's names, the public ones, ``jk jax jnp optax nnx``, and a small problem:
``apply_fn`` and ``params`` of a model with the layers ``dense`` and ``head``, ``inputs``,
``targets``, ``batch``, ``objective``, ``stats``, ``like``, ``value``, ``grads``, ``factors``,
``bases``.
"""

import ast
import doctest
import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def docstrings(source: str) -> list[tuple[str, str, int]]:
    """``(dotted name, docstring, line)`` of every definition in a file, itself included."""
    found: list[tuple[str, str, int]] = []

    def visit(node: ast.AST, name: str) -> None:
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (text := ast.get_docstring(node, clean=True)):
            found.append((name, text, node.body[0].lineno))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):  # no definition is in one
                continue
            visit(child, f"{name}.{child.name}".strip(".") if hasattr(child, "name") else name)

    visit(ast.parse(source), "")
    return found


def examples(source: str, path: str) -> list[doctest.DocTest]:
    """The docstrings of a file that hold examples."""
    parser = doctest.DocTestParser()
    tests = [
        parser.get_doctest(text, {}, name or "(module)", path, line)
        for name, text, line in docstrings(source)
    ]
    return [test for test in tests if test.examples]


def _files() -> list[Path]:
    return [p for p in sorted((ROOT / "jaxkfac").rglob("*.py")) if not p.stem.endswith("_test")]


def _cases() -> list[Any]:
    return [
        pytest.param(test, id=f"{path.relative_to(ROOT)}:{test.name}")
        for path in _files()
        for test in examples(path.read_text(), str(path.relative_to(ROOT)))
    ]


@functools.cache
def _problem() -> dict[str, Any]:
    """A network on random data, and everything the library computes for it."""
    import jax
    import jax.numpy as jnp
    import optax  # noqa: F401
    from flax import nnx

    import jaxkfac as jk

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(nnx.tanh(self.dense(x)))

    apply_fn, params = jk.from_nnx(Model(nnx.Rngs(0)))
    inputs = jax.random.normal(jax.random.key(1), (16, 4))
    targets = jnp.arange(16) % 3
    batch = (inputs, targets)
    objective = jk.Objective(apply_fn, jk.Categorical())
    stats = jk.value_grad_and_factors(objective)
    like = stats.factor_shapes(params, batch)
    value, grads, factors = stats(params, batch)
    bases = jk.eigendecompose(factors)
    public = {name: getattr(jk, name) for name in jk.__all__}
    return public | {name: thing for name, thing in locals().items() if name != "public"}


@pytest.mark.default(40, slow=4)
@pytest.mark.standard_promotion  # as a user runs them
@pytest.mark.parametrize("case", _cases())
def test_example_prints_what_it_says(case: doctest.DocTest):
    module = ".".join(Path(case.filename or "").with_suffix("").parts).removesuffix(".__init__")
    case.globs = _problem() | vars(importlib.import_module(module))
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(case, out=report.append)
    assert result.failed == 0, "".join(report)
    assert result.attempted == len(case.examples)


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_example_escapes_execution(path: Path):
    for name, text, _ in docstrings(path.read_text()):
        assert "doctest: +SKIP" not in text, f"{name}: run the example or leave it out"
        assert "```python" not in text, f"{name}: write examples as >>>, which are executed"


# What a damping is added to, or the function that says so.
_UNITS = (
    "curvature of the mean loss",
    "operator's units",
    "added to $N \\lambda$",
    "over the trace of $K$",
    "As for :func:`influence`",
    "The arguments are those of :func:`apply_power`",
)


def test_every_public_damping_says_what_it_is_added_to():
    import jaxkfac as jk

    public = {x: getattr(jk, x) for x in jk.__all__}
    public |= {f"operators.{x}": getattr(jk.operators, x) for x in jk.operators.__all__}
    damped = {
        name: " ".join((thing.__doc__ or "").split())
        for name, thing in public.items()
        if inspect.isfunction(thing) and "damping" in inspect.signature(thing).parameters
    }
    assert len(damped) >= 10
    without = [name for name, text in damped.items() if not any(x in text for x in _UNITS)]
    assert without == []


def test_a_wrong_example_is_found_and_fails():
    source = (
        'class A:\n    def f(self):\n        """F.\n\n        >>> 1 + 1\n        3\n        """\n'
    )
    (case,) = examples(source, "a.py")
    assert case.name == "A.f"
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(case, out=lambda text: None)
    assert result.failed == 1
