"""A K-FAC whose average and inverses are packed trains like a dense one."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.optim import kfac, multi_steps

N, WIDE = 32, 70  # sides of 70, 71 and 8: packed, packed with ones, and too small


def model(params, x):
    def layer(x, p):
        return jnp.tanh(x @ p["w"] + p["b"]), None

    x, _ = jax.lax.scan(layer, x, params["blocks"])
    return jnp.tanh(x @ params["wide"]) @ params["out"]["w"] + params["out"]["b"]


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape) / 8
    params = {
        "blocks": {"w": normal(keys[0], 2, WIDE, WIDE), "b": jnp.zeros((2, WIDE))},
        "wide": normal(keys[1], WIDE, WIDE),
        "out": {"w": normal(keys[2], WIDE, 8), "b": jnp.zeros(8)},
    }
    batch = jax.random.normal(keys[3], (N, WIDE)), jax.random.randint(keys[4], (N,), 0, 8)
    return Objective(model, Categorical()), params, batch


def trained(problem, *, packed, steps=6, accumulate=None, **options):
    objective, params, batch = problem
    stats = value_grad_and_factors(objective, fisher="mc", packed=packed == "collected")
    tx = kfac(
        **{"learning_rate": 0.1, "refresh_every": 2} | options,
        like=stats.factor_shapes(params, batch),
        packed="auto" if packed == "collected" else packed,
    )
    tx = tx if accumulate is None else multi_steps(tx, accumulate)

    @jax.jit
    def step(carry, key):
        params, state = carry
        value, grads, factors = stats(params, batch, key)
        adapt = stats.adaptation(params, batch, key) if "learning_rate" in options else {}
        updates, state = tx.update(grads, state, params, factors=factors, **adapt)
        return (optax.apply_updates(params, updates), state), value

    start = params, tx.init(params)
    return jax.lax.scan(step, start, jax.random.split(jax.random.key(1), steps))


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        # The same operations, which a scan fuses otherwise.
        pytest.param({}, 1e-6, marks=pytest.mark.exhaustive),
        ({"damping_mode": "pi"}, 1e-6),  # one triangle of a stored inverse counts
        pytest.param({"inverse": "qr"}, 1e-6, marks=pytest.mark.exhaustive),
        # Rounding, through ratios of small numbers.
        pytest.param({"learning_rate": "quadratic"}, 1e-5, marks=pytest.mark.exhaustive),
    ],
    ids=["exact", "pi", "qr", "adaptive"],
)
def test_a_packed_state_trains_like_a_dense_one(problem, options, tolerance):
    (params, state), values = trained(problem, packed=False, **options)
    (found, packed_state), found_values = trained(problem, packed="collected", **options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * float(abs(y).max() or 1))
    np.testing.assert_allclose(found_values, values, rtol=tolerance)
    for name in state.average:
        for side, expected in zip(packed_state.average[name], state.average[name], strict=True):
            assert side.shape == expected.shape
            np.testing.assert_allclose(side, expected, rtol=1e-5, atol=1e-6)
    assert packed_state.stacked_average.is_packed and not packed_state.average.is_packed
    assert nbytes(packed_state.stacked_average) < 0.56 * nbytes(state.stacked_average)
    if options.get("damping_mode") == "pi":
        assert nbytes(packed_state.stacked_bases) < 0.56 * nbytes(state.stacked_bases)


# ---------------- under other transformations


@pytest.fixture(scope="module")
def two_layers():
    keys = jax.random.split(jax.random.key(2), 4)
    params = {
        "in": jax.random.normal(keys[0], (WIDE, 80)) / 8,
        "out": jax.random.normal(keys[1], (80, 6)) / 8,
    }
    batch = jax.random.normal(keys[2], (N, WIDE)), jax.random.randint(keys[3], (N,), 0, 6)
    objective = Objective(lambda p, x: jnp.tanh(x @ p["in"]) @ p["out"], Categorical())
    return value_grad_and_factors(objective), params, batch


def stepped(problem, make=kfac, *, packed, jit=True, mesh=None, place=None, **options):
    """Parameters after three steps."""
    stats, params, batch = problem
    tx = make(
        learning_rate=0.1,
        like=stats.factor_shapes(params, batch),
        packed=packed,
        refresh_every=2,
        **options,
    )

    def step(params, state, batch):
        _, grads, factors = stats(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1)) if jit else step
    params = jax.tree.map(jnp.copy, params)  # which are donated
    if place is not None:
        params, batch = place(params), place(batch)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state, batch)
    return jax.tree.map(np.asarray, params)


def assert_close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"inverse": "host", "jit": False}, marks=pytest.mark.slow),
        pytest.param({"jit": False}, marks=pytest.mark.exhaustive),
        {"make": optax.inject_hyperparams(kfac, static_args=("like", "packed"))},
    ],
    ids=["host", "eager", "injected"],
)
def test_steps_of_a_packed_state_are_those_of_a_dense_one(two_layers, options):
    results = [stepped(two_layers, packed=packed, **options) for packed in (True, False)]
    assert_close(*results)


@pytest.mark.exhaustive
def test_vmap_steps_each_packed_state_by_itself(two_layers):
    stats, params, batch = two_layers
    tx = kfac(0.1, like=stats.factor_shapes(params, batch), packed=True, damping_mode="pi")

    def steps(params):
        state = tx.init(params)
        for _ in range(2):
            _, grads, factors = stats(params, batch)
            updates, state = tx.update(grads, state, params, factors=factors)
            params = optax.apply_updates(params, updates)
        return params

    doubled = jax.tree.map(lambda x: 2 * x, params)
    together = jax.vmap(steps)(jax.tree.map(lambda *x: jnp.stack(x), params, doubled))
    for i, one in enumerate((params, doubled)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), steps(one))


@pytest.mark.exhaustive
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_packed_state_on_two_devices_is_that_of_one(two_layers, axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    options: dict = {"packed": True, "damping_mode": "pi"}
    expected = stepped(two_layers, **options)
    if axis_type is AxisType.Auto:  # the decompositions are divided
        found = stepped(two_layers, mesh=mesh, distribute="data", **options)
    else:  # rows of parameters and examples are divided
        place = lambda tree: jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))), tree
        )
        found = stepped(two_layers, mesh=mesh, place=place, **options)
    assert_close(found, expected)


@pytest.mark.slow
def test_a_stack_of_no_matrices_changes_nothing():
    params = {"w": jnp.zeros((0, WIDE, WIDE)), "out": jnp.ones((WIDE, 3)) / WIDE}
    batch = jnp.ones((N, WIDE)), jnp.zeros(N, int)

    def empty(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return x @ params["out"]

    stats = value_grad_and_factors(Objective(empty, Categorical()))
    _, grads, factors = stats(params, batch)
    results = []
    for mode, packed in (("pi", True), ("pi", False), ("exact", True)):
        tx = kfac(0.1, like=factors, packed=packed, damping_mode=mode)
        updates, state = tx.update(grads, tx.init(params), params, factors=factors)
        assert int(state.skipped) == int(state.kept) == 0 and jnp.any(updates["out"])
        results.append(updates)
    assert_close(*results[:2])


@pytest.mark.slow
def test_accumulated_factors_are_packed_like_the_state(problem):
    (params, state), _ = trained(problem, packed=False, accumulate=2)
    (found, packed_state), _ = trained(problem, packed=True, accumulate=2)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6 * float(abs(y).max() or 1))
    sums, expected = (s.accumulation.acc_grads["factors"] for s in (packed_state, state))
    assert nbytes(sums) < 0.56 * nbytes(expected)


@pytest.mark.exhaustive
def test_packed_and_dense_factors_serve_either_state(problem):
    objective, params, batch = problem
    stats = value_grad_and_factors(objective)
    _, grads, factors = stats(params, batch)
    results = []
    for packed in (False, True):
        tx = kfac(0.1, like=factors, packed=packed)
        for given in (factors, factors.packed()):
            results.append(tx.update(grads, tx.init(params), params, factors=given)[0])
    for more in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, more, results[0])


@pytest.mark.slow
def test_a_state_of_the_other_storage_is_refused(problem):
    objective, params, batch = problem
    stats = value_grad_and_factors(objective)
    _, grads, factors = stats(params, batch)
    dense, packed = (kfac(0.1, like=factors, packed=x) for x in (False, True))
    with pytest.raises(ValueError, match=r"average is dense.*packed=False.*tx\.init"):
        packed.update(grads, dense.init(params), params, factors=factors)
    with pytest.raises(ValueError, match=r"average is packed.*packed=True.*tx\.init"):
        dense.update(grads, packed.init(params), params, factors=factors)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("mode", ["exact", "pi"])
def test_bytes_of_the_other_storage_or_cut_short_are_refused(problem, mode):
    objective, params, batch = problem
    like = value_grad_and_factors(objective).factor_shapes(params, batch)
    states, written = {}, {}
    for packed in (False, True):
        tx = kfac(0.1, like=like, packed=packed, damping_mode=mode)
        states[packed] = tx.init(params)
        written[packed] = serialization.to_bytes(states[packed])
    for packed, target in states.items():
        restored = serialization.from_bytes(target, written[packed])
        jax.tree.map(np.testing.assert_array_equal, restored, target)
        with pytest.raises(ValueError, match=r"Factors: .*another packed=.*tx\.init\(params\)"):
            serialization.from_bytes(target, written[not packed])
        for size in (len(written[packed]) // 2, len(written[packed]) - 1):
            with pytest.raises(ValueError, match="incomplete"):
                serialization.from_bytes(target, written[packed][:size])


@pytest.mark.slow
def test_a_factor_that_is_not_finite_is_skipped_and_a_failed_inverse_kept(problem):
    objective, params, batch = problem
    stats = value_grad_and_factors(objective)
    _, grads, factors = stats(params, batch)
    tx = kfac(0.1, like=factors, packed=True, damping=0.0, damping_mode="factored", decay=0.0,
              refresh_every=1)  # fmt: skip
    _, state = tx.update(grads, tx.init(params), params, factors=factors)
    name = "wide"
    broken = dataclasses.replace(
        factors, g_sums=factors.g_sums | {name: factors.g_sums[name].at[60, 3].set(jnp.nan)}
    )
    _, after = tx.update(grads, state, params, factors=broken)
    assert int(after.skipped) == 1
    negative = dataclasses.replace(factors, g_sums=factors.g_sums | {name: -jnp.eye(WIDE)})
    _, after = tx.update(grads, state, params, factors=negative)
    assert int(after.kept) == 1
    np.testing.assert_array_equal(after.stacked_bases.g[name], state.stacked_bases.g[name])
