"""A row of the zoo, and how it is checked."""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close
from tests._likelihoods import mean_loss
from tests._oracle import Block, oracle
from tests._taps import Model


@dataclasses.dataclass(frozen=True)
class Case:
    """A program with data, in float64 where the model allows.

    ``twin`` is the same program written with taps (``tests._taps``), from which brute force has
    the factors; ``factors`` are those of some layers where they come from elsewhere. A case with
    neither is checked by its coverage and its gradient alone, and the table says so. Where
    examples are ``coupled`` the whole batch is one example to brute force.
    """

    objective: Callable  # a jk.Objective, or a scalar loss of (params, batch)
    params: Any
    batch: Any
    twin: Model | None = None
    factors: Mapping[str, Block] | None = None
    likelihood: str = "categorical"
    options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # of value_grad_and_factors
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # key=, state=, positions=
    coupled: bool = False
    tolerance: float = 1e-10


@dataclasses.dataclass(frozen=True)
class Program:
    """What the table says of a program."""

    name: str
    family: str
    checked: str  # against what
    build: Callable[[], Case]
    uncovered: Mapping[str, str]  # path: what its reason holds; empty where all is covered
    unchecked: frozenset[str]  # layers whose gradient alone is compared
    needs: tuple[str, ...]  # packages that the tests' environment may lack

    @property
    def available(self) -> bool:
        return all(importlib.util.find_spec(package) for package in self.needs)


PROGRAMS: dict[str, Program] = {}


def program(
    name: str,
    *,
    family: str,
    checked: str,
    uncovered: Mapping[str, str] | None = None,
    unchecked: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Enter a builder under ``name``, as a reader of the table knows the program."""

    def enter(build: Callable[[], Case]) -> Callable[[], Case]:
        if name in PROGRAMS:
            raise ValueError(f"two programs of the zoo are called {name!r}")
        missing = dict(uncovered or {}), frozenset(unchecked)
        PROGRAMS[name] = Program(name, family, checked, build, *missing, needs)
        return build

    return enter


def check_coverage(row: Program, case: Case) -> None:
    """Exactly the parameters that the row names are uncovered, for the reasons it names."""
    table = jk.find_layers(case.objective, case.params, case.batch, **case.call)
    reasons = {
        path: [why for p, why in table.uncovered if p == path] for path, _ in table.uncovered
    }
    assert set(reasons) == set(row.uncovered), reasons
    for path, words in row.uncovered.items():
        assert any(words in why for why in reasons[path]), (path, reasons[path])


def check_agreement(case: Case) -> None:
    """``find_layers`` lists a problem exactly where ``value_grad_and_factors`` raises."""
    options = {k: v for k, v in case.options.items() if k != "uncovered"}
    finding = {k: v for k, v in options.items() if k in ("layers", "max_dense", "experts")}
    call = {k: v for k, v in case.call.items() if k in ("key", "state")}
    table = jk.find_layers(case.objective, case.params, case.batch, **call, **finding)
    stats = jk.value_grad_and_factors(case.objective, **options)
    try:
        stats.factor_shapes(case.params, case.batch, **case.call)
    except jk.UncoveredParameterError:
        assert table.problems
    else:
        assert not table.problems


def check_compiled_once(row: Program, case: Case) -> None:
    """A step from the results of the step before has the same types, so nothing is compiled."""
    options = ({"uncovered": "ignore"} if row.uncovered else {}) | dict(case.options)
    stats = jk.value_grad_and_factors(case.objective, **options)

    @jax.jit
    def step(params: Any, call: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        value, grads, _ = stats(params, case.batch, **call)
        moved = jax.tree.map(lambda p, g: p - jnp.zeros((), p.dtype) * g, params, grads)
        return moved, call | ({"state": value[1]} if "state" in call else {})

    params, call = step(case.params, dict(case.call))
    if any(map(_on_mesh, jax.tree.leaves(params))):
        # Parameters that were on no mesh come back on that of a map inside; a plain gradient does
        # the same, and compiles once more for it.
        step.clear_cache()
        params, call = step(params, call)
    compiled = step._cache_size()
    step(params, call)
    assert step._cache_size() == compiled == 1


def _on_mesh(x: jax.Array) -> bool:
    return isinstance(x.sharding, jax.sharding.NamedSharding)


def check_factors(row: Program, case: Case) -> None:
    """The value and gradient of plain JAX, and the factors of brute force."""
    options = ({"uncovered": "ignore"} if row.uncovered else {}) | dict(case.options)
    options = {"scales": "diagonal", **options}  # brute force squares at each position
    stats = jax.jit(jk.value_grad_and_factors(case.objective, **options))
    value, grads, factors = stats(case.params, case.batch, **case.call)
    plain = jax.jit(jax.value_and_grad(case.objective, has_aux="state" in case.call))
    loss, gradient = plain(case.params, case.batch, **case.call)
    for found, expected in zip(jax.tree.leaves(value), jax.tree.leaves(loss), strict=True):
        np.testing.assert_allclose(found, expected, rtol=case.tolerance)
    assert_tree_close(grads, gradient, case.tolerance)
    expected = dict(case.factors or {})
    if case.twin is not None:
        twin_loss = mean_loss(case.twin, case.likelihood, case.params, case.batch)
        np.testing.assert_allclose(twin_loss, jax.tree.leaves(loss)[0], rtol=case.tolerance)
        expected |= _brute_force(case, case.twin)
    if expected:
        assert set(factors) - set(expected) == row.unchecked
    assert_factors_close({name: factors[name] for name in expected}, expected, case.tolerance)


def _brute_force(case: Case, twin: Model) -> dict[str, Block]:
    batch = case.batch
    if case.coupled:
        one, batch = twin, jax.tree.map(lambda x: x[None], batch)
        twin = lambda p, x, tap: one(p, jax.tree.map(lambda x: x[0], x), tap)[None]
    return oracle(twin, case.params, batch, likelihood=case.likelihood)
