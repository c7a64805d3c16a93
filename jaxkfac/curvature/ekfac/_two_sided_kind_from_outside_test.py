"""A kind with two sides made outside the library: its Kronecker block is that of a dense layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature import correct_eigenvalues, eigendecompose
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.interception import _kind, find_layers, register_kind
from jaxkfac.interception._kind import Use
from jaxkfac.interception.values import UseAxes
from jaxkfac.kinds import Rows, TwoSided, matrix_problem

pytestmark = pytest.mark.usefixtures("x64")


class Ragged(TwoSided):
    """``lax.ragged_dot`` with a single group: rows times one matrix, in place of the library's."""

    name = "ragged"
    primitives = frozenset(("ragged_dot_general", "ragged_dot"))
    suffix = "ragged"

    def find(self, table, at, ins):
        view, data = ins[at.operand], ins[0]
        if at.operand != 1 or at.eqn.invars[1].aval.shape[0] != 1:
            return "is read by a `ragged_dot` of several groups"
        if problem := matrix_problem(table, view, "ragged_dot"):
            return problem
        axes = UseAxes((view.axes[1],), (view.axes[2],), rows=data.axes[:1])
        return Use(self, view, at, data, axes)

    def result_axes(self, table, use):
        return (*use.axes.rows, table.new(use.at.eqn.outvars[0].aval.shape[1], "feature"))

    def reading(self, use, place):
        return repr([place(axis) for axis in use.axes.inputs])

    def inputs(self, vjp):
        return Rows(vjp.data, (0,), (), ((1, vjp.use.axes.inputs[0]),))

    def outputs(self, vjp):
        return Rows(vjp.cotangent, (0,), (), ((1, vjp.use.axes.outputs[0]),))


@pytest.fixture(autouse=True)
def _ragged(monkeypatch):
    others = {name: kind for name, kind in _kind._KINDS.items() if name != "ragged"}
    monkeypatch.setattr(_kind, "_KINDS", others)
    register_kind(Ragged)


def ragged(p, x):
    sizes = jnp.asarray([len(x)], jnp.int32)
    x = jnp.tanh(jax.lax.ragged_dot(x, 3.0 * p["w"], sizes))
    return jax.lax.ragged_dot(x, p["v"], sizes)


def dense(p, x):
    return jnp.tanh(x @ (3.0 * p["w"][0])) @ p["v"][0]


def problem(model):
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(1, 4, 3))),
        "v": jnp.asarray(rng.normal(size=(1, 3, 2))),
    }
    batch = (jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray(rng.normal(size=(6, 2))))
    return Objective(model, Gaussian()), params, batch


def test_it_is_found():
    _, params, (x, _) = problem(ragged)
    table = find_layers(ragged, params, x)
    found = [(layer.kind, layer.in_features, layer.out_features) for layer in table.layers]
    assert found == [("ragged", 4, 3), ("ragged", 3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_value_gradient_and_factors_are_those_of_the_dense_layer(fisher):
    results = []
    for model in (ragged, dense):
        objective, params, batch = problem(model)
        value, grads, factors = value_grad_and_factors(objective, fisher=fisher)(params, batch)
        sides = [(f.a, f.g) for f in (_block(factors, "w"), _block(factors, "v"))]
        results.append((value, grads, sides))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), *results)


@pytest.mark.slow
def test_its_eigenvalues_are_corrected_to_those_of_the_dense_layer():
    results = []
    for model in (ragged, dense):
        objective, params, batch = problem(model)
        bases = eigendecompose(value_grad_and_factors(objective)(params, batch).factors)
        corrected = correct_eigenvalues(objective, bases)(params, batch)
        results.append([_block(corrected, name).raw_values for name in "wv"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12), *results)


def _block(tree, name):
    """The block of a parameter, which is a slice of it in the dense program."""
    return tree[name] if name in tree else tree[f"{name}[0]"]
