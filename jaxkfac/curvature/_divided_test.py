import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkfac.curvature import eigendecompose
from jaxkfac.curvature._placement import MeshAxis, solve_divided
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.linalg.spectral import eigh_checked
from jaxkfac.memory import in_equal_shares


@pytest.fixture
def mesh():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def matrices(*shapes):
    """Of each ``(stack..., n)`` positive matrices."""
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=(*shape, shape[-1] + 2)).astype(np.float32) for shape in shapes]
    return [(jnp.asarray(x @ x.swapaxes(-1, -2)),) for x in rows]


PROBLEMS = [(5,), (3, 8), (8,), (2, 2, 3)]


@pytest.mark.slow
def test_divided_decompositions_have_the_bits_of_those_alone(mesh):
    problems = matrices(*PROBLEMS)
    solve = jax.jit(lambda problems: solve_divided(problems, eigh_checked, MeshAxis(mesh, "data")))
    for found, problem in zip(solve(problems), problems, strict=True):
        expected = jax.jit(eigh_checked)(*problem)
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.vectors, expected.vectors)


def test_a_matrix_that_is_not_finite_spoils_no_other(mesh):
    problems = matrices((4,), (4,))
    problems[0] = (problems[0][0].at[1, 2].set(jnp.nan),)
    axis = MeshAxis(mesh, "data")
    bad, good = jax.jit(lambda p: solve_divided(p, eigh_checked, axis))(problems)
    assert np.isnan(bad.values).all() and np.isfinite(good.values).all()
    assert np.isfinite(good.vectors).all()


def _sizes_by_branch(jaxpr):
    """Sizes of the matrices that each branch of the switch decomposes, stacks counted."""

    def eighs(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "eigh":
                *batch, n, _ = eqn.invars[0].aval.shape
                yield from [n] * int(np.prod(batch, dtype=int))
            for value in eqn.params.values():
                if eqn.primitive.name == "cond" and isinstance(value, tuple):
                    value = value[-1]  # one of the platforms: the batch as a whole
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from eighs(inner)

    def switches(jaxpr):
        for eqn in jaxpr.eqns:
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from switches(inner)
            if eqn.primitive.name == "cond":
                yield eqn

    switch = list(switches(jaxpr))[-1]
    return [list(eighs(branch.jaxpr)) for branch in switch.params["branches"]]


def test_no_device_has_more_than_its_share_and_the_largest(mesh):
    solve = functools.partial(solve_divided, solve=eigh_checked, axis=MeshAxis(mesh, "data"))
    closed = jax.make_jaxpr(solve)(matrices(*PROBLEMS))
    sizes = _sizes_by_branch(closed.jaxpr)
    assert sorted(itertools.chain(*sizes)) == [3, 3, 3, 3, 5, 8, 8, 8, 8]
    cubes = [sum(n**3 for n in branch) for branch in sizes]
    assert max(cubes) <= sum(cubes) / 2 + 8**3


def test_shares_differ_by_at_most_the_largest():
    draw = np.random.default_rng(0)
    for count in (1, 3, 8):
        costs = [int(n) for n in draw.integers(1, 1000, 40)]
        loads = [0] * count
        for cost, owner in zip(costs, in_equal_shares(costs, count), strict=True):
            loads[owner] += cost
        assert max(loads) <= sum(costs) / count + max(costs)


def _factors(x):
    objective = Objective(lambda p, x: x @ p["kernel"], Gaussian())
    stats = value_grad_and_factors(objective)
    return stats({"kernel": jnp.ones((3, 2))}, (x, jnp.zeros((4, 2))))


@pytest.mark.slow
def test_the_mesh_is_that_which_is_set_or_that_of_the_arrays(mesh):
    factors = _factors(jnp.arange(12.0).reshape(4, 3)).factors
    expected = eigendecompose(factors, placement="device")
    divide = functools.partial(eigendecompose, placement="device", distribute="data")
    placed = jax.device_put(factors, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        set_ = jax.jit(divide)(factors)
    for found in (set_, divide(placed)):
        assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.slow
def test_an_axis_that_cannot_be_divided_over_is_refused(mesh):
    factors = _factors(jnp.arange(12.0).reshape(4, 3)).factors
    with pytest.raises(ValueError, match="distribute='data': no mesh is known here"):
        jax.jit(functools.partial(eigendecompose, distribute="data"))(factors)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="distribute='dta' names no axis of the mesh.*data"):
            eigendecompose(factors, distribute="dta")
        with pytest.raises(ValueError, match="not with placement='host'"):
            eigendecompose(factors, placement="host", distribute="data")
        inside = jax.shard_map(
            lambda f: eigendecompose(f, distribute="data").a["kernel"].values,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )
        with pytest.raises(ValueError, match=r"inside jax\.shard_map over 'data'"):
            inside(factors)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_host_decomposes_inside_of_a_mesh_that_is_set(mesh, axis_type):
    factors = _factors(jnp.arange(12.0).reshape(4, 3)).factors
    expected = eigendecompose(factors, placement="host")
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(axis_type,))):
        found = eigendecompose(factors, placement="host")
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
