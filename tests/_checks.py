"""Compare the library's answers with the oracle's; used by every test in this folder."""

import contextlib
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import jaxkfac as jk
from tests._likelihoods import mean_loss
from tests._oracle import Block, oracle
from tests._taps import PLAIN, Model

LIKELIHOODS = {"categorical": jk.Categorical, "bernoulli": jk.Bernoulli, "gaussian": jk.Gaussian}


def objective_of(model: Model, likelihood: str = "categorical") -> jk.Objective:
    """The library's objective over the model without taps."""
    return jk.Objective(lambda p, x: model(p, x, PLAIN), LIKELIHOODS[likelihood]())


def assert_tree_close(found: Any, expected: Any, tolerance: float) -> None:
    """Same structure; every leaf within ``tolerance`` of the leaf's largest entry (or 1)."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, x), y in zip(leaves, jax.tree.leaves(expected), strict=True):
        wide = np.complex128 if np.iscomplexobj(y) else np.float64
        x, y = np.asarray(x, wide), np.asarray(y, wide)
        assert x.shape == y.shape, path
        bound = tolerance * max(1.0, np.abs(y).max(initial=0))
        assert np.abs(x - y).max(initial=0) <= bound, f"{path}: {np.abs(x - y).max()} > {bound}"


def assert_block_close(found: Any, expected: Block, tolerance: float, name: str = "") -> None:
    """One layer's means against the oracle's, relative to the block's largest entry."""
    for side in ("a", "g", "diagonal"):
        want = getattr(expected, side)
        if want is None:
            continue
        got = np.asarray(getattr(found, side), np.float64)
        assert got.shape == want.shape, f"{name}.{side}: {got.shape}, expected {want.shape}"
        error, bound = np.abs(got - want).max(), tolerance * max(1.0, np.abs(want).max())
        assert error <= bound, f"{name}.{side} is off by {error}, allowed {bound}"


def squares(objective, params, batch, paths, **call):
    """Diagonals of the Fisher for some parameters, from each example's gradient by itself."""

    def loss(params, one):
        value = objective(params, jax.tree.map(lambda x: x[None], one), **call)
        return value[0] if isinstance(value, tuple) else value

    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
    terms = batch[1][0].size  # of one example
    return {
        path: Block("reparameterised", None, None, terms * (each[path] ** 2).mean(0))
        for path in paths
    }


def assert_factors_close(found: Any, expected: dict[str, Block], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, block in expected.items():
        assert_block_close(found[name], block, tolerance, name)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _direct(model: Model, likelihood: str, params: Any, batch: tuple):
    """Plain JAX; compiled once for all checks of one model."""
    return jax.value_and_grad(lambda p: mean_loss(model, likelihood, p, batch))(params)


def check(
    model: Model,
    params: Any,
    batch: tuple,
    *,
    likelihood: str = "categorical",
    oracle_model: Model | None = None,
    fisher: str = "empirical",
    sharing: str = "expand",
    scales: str = "diagonal",
    bias: str = "joint",
    positions: Any = None,
    labels: Any = None,
    tolerance: float = 1e-10,
    jit: bool = True,
    **options: Any,
):
    """Value, gradient and every factor of the library against plain JAX and the oracle.

    ``oracle_model`` is the same function written without loops or wrappers, where
    ``model`` has them; ``labels`` go with ``fisher="mc"``. Returns what the library returned.
    """
    options |= {"fisher": fisher, "sharing": sharing, "scales": scales, "bias": bias}
    stats = jk.value_grad_and_factors(objective_of(model, likelihood), **options)
    extra = {k: v for k, v in {"positions": positions, "labels": labels}.items() if v is not None}
    value, grads, factors = (jax.jit(stats) if jit else stats)(params, batch, **extra)
    plain = oracle_model or model
    loss, gradient = _direct(plain, likelihood, params, batch)
    np.testing.assert_allclose(value, loss, rtol=tolerance)
    assert_tree_close(grads, gradient, tolerance)
    expected = oracle(
        plain, params, batch, likelihood=likelihood, fisher=fisher, sharing=sharing,
        scales=scales, bias=bias, **extra,
    )  # fmt: skip
    assert_factors_close(factors, expected, tolerance)
    return value, grads, factors


def assert_reported(fn: Any, params: Any, args: tuple, path: str, primitive: str) -> str:
    """The coverage table has a row for ``path`` whose reason matches ``primitive``."""
    rows = [(p, why) for p, why in jk.find_layers(fn, params, *args).uncovered if p == path]
    assert rows, f"{path} is not in the coverage table"
    assert any(re.search(primitive, why) for _, why in rows), rows
    return " ".join(why for _, why in rows)


def assert_reported_and_raises(
    objective: Any, params: Any, batch: tuple, path: str, primitive: str, **options: Any
) -> None:
    """Reported by name, and an error that names the path unless another choice is made."""
    assert_reported(objective, params, (batch,), path, primitive)
    with pytest.raises(jk.UncoveredParameterError, match=re.escape(path)):
        jk.value_grad_and_factors(objective, **options)(params, batch)


def assert_gradient_is_exact(objective: Any, params: Any, batch: tuple, **options: Any) -> None:
    """Operation by operation, the program run again gives the bits of the original."""
    with jax.disable_jit():
        _, grads, _ = jk.value_grad_and_factors(objective, **options)(params, batch)
        expected = jax.grad(objective)(params, batch)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def equations(jaxpr: Any):
    """Every equation of a jaxpr and of the jaxprs inside its parameters, in order."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
                yield from equations(value)


@contextlib.contextmanager
def two_devices():
    """The first two devices; the test is skipped where there is only one."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices: set jax_num_cpu_devices=2 before JAX starts")
    yield jax.devices()[:2]
