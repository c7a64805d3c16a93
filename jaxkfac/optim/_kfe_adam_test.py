import dataclasses

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkfac.blocks import update_average, zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.curvature import eigendecompose
from jaxkfac.factors import Categorical, Gaussian, Objective
from jaxkfac.factors import value_grad_and_factors as collector
from jaxkfac.factors._explicit_net_test import net_batch, net_like, net_params, net_statistics
from jaxkfac.optim import check_state, kfac, kfe_adam, multi_steps

pytestmark = pytest.mark.usefixtures("x64")

B1, B2, EPS = 0.9, 0.99, 1e-8


@pytest.fixture
def problem():
    params = net_params(jax.random.key(0))
    batches = [net_batch(jax.random.key(i), 8) for i in range(6)]
    return params, batches, net_like(params, batches[0])


def assert_close(a, b, tol=1e-10):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


def jitted(tx):
    return jax.jit(lambda g, s, p, f: tx.update(g, s, p, factors=f))


def run(step, params, state, batches):
    for batch in batches:
        grads, factors = net_statistics(params, batch)
        updates, state = step(grads, state, params, factors)
        params = optax.apply_updates(params, updates)
    return params, state


class Adam:
    """One matrix in given eigenvectors, in NumPy."""

    def __init__(self, shape):
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0

    def step(self, g, left, right):
        self.t += 1
        self.m = B1 * self.m + (1 - B1) * g
        self.v = B2 * self.v + (1 - B2) * (left.T @ g @ right) ** 2
        m = left.T @ self.m @ right / (1 - B1**self.t)
        return left @ (m / (np.sqrt(self.v / (1 - B2**self.t)) + EPS)) @ right.T


@pytest.mark.slow
def test_every_step_equals_the_algorithm_written_out(problem):
    params, batches, like = problem
    rate, decay, weight = (lambda t: 0.1 / (1.0 + t)), 0.7, 0.05
    tx = kfe_adam(rate, like=like, decay=decay, refresh_every=2, refresh="eigh",
                  weight_decay=weight)  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):  # the schedule divides by an int32 step
        got, state = run(jitted(tx), params, tx.init(params), batches)
    # As trees of arrays in the order of the paths: kernel and bias are one matrix.
    average, parts = zeros_like(like), {}
    for t, batch in enumerate(batches):
        grads, factors = net_statistics(params, batch)
        average = update_average(average, factors, decay)
        if t % 2 == 0:
            bases = eigendecompose(average)
        steps = jax.tree.map(np.array, params)
        for name, joint in (("left", True), ("right", False), ("head", True)):
            basis, g = bases[f"{name}/kernel"], np.asarray(grads[name]["kernel"])
            g = np.concatenate([g, np.asarray(grads[name]["bias"])[None]]) if joint else g
            adam = parts.setdefault(name, Adam(g.shape))
            u = adam.step(g, np.asarray(basis.a_vectors), np.asarray(basis.g_vectors))
            steps[name]["kernel"] = u[:-1] if joint else u
            if joint:
                steps[name]["bias"] = u[-1]
        scale = parts.setdefault("scale", Adam((1, 4)))
        steps["scale"] = scale.step(np.asarray(grads["scale"])[None], np.eye(1), np.eye(4))[0]
        params = jax.tree.map(lambda x, u, t=t: x - rate(t) * (u + weight * x), params, steps)
    assert_close(got, params)
    assert int(state.step) == 6 and int(state.skipped) == 0 and int(state.kept) == 0


@pytest.mark.slow
def test_scan_equals_a_loop_and_a_saved_state_goes_on_bit_for_bit(problem):
    params, batches, like = problem
    tx = kfe_adam(0.01, like=like, refresh_every=2)
    step = jitted(tx)
    middle, state = run(step, params, tx.init(params), batches[:3])
    written = flax.serialization.to_bytes(state)
    looped, last = run(step, middle, state, batches[3:])
    restored = flax.serialization.from_bytes(tx.init(params), written)
    again, other = run(step, middle, restored, batches[3:])
    assert_close((again, other), (looped, last), 0.0)

    def one(carry, batch):
        params, state = carry
        grads, factors = net_statistics(params, batch)
        updates, state = tx.update(grads, state, params, factors=factors)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    (scanned, _), _ = jax.lax.scan(one, (params, tx.init(params)), stacked)
    assert_close(scanned, looped)


@pytest.mark.slow
def test_the_average_is_stored_like_the_factors():
    layers = (layer("w", (64, 65)), layer("table", (70, 3), kind="embedding", a_dense=False))
    factors = random_factors(layers, jax.random.key(0))
    params = {"w": jnp.ones((64, 65)), "table": jnp.ones((70, 3))}
    for like in (factors, factors.packed()):
        average = jax.eval_shape(kfe_adam(0.1, like=like).init, params).stacked_average
        assert average.is_packed == like.is_packed
        side = (71, 35) if like.is_packed else (70, 70)  # of the gradient's covariance
        assert average.a_sums["table"].shape == side


@pytest.mark.exhaustive
@pytest.mark.parametrize("covariance", ["factors", "gradient"])
def test_a_packed_average_moves_like_a_dense_one(covariance):
    """The side of the vocabulary is a diagonal in factors, so its covariance is the gradient's."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "table": jax.random.normal(keys[0], (66, 64)),
        "w": jax.random.normal(keys[1], (64, 65)) / 8,
        "out": jax.random.normal(keys[2], (65, 3)) / 8,
    }
    apply_fn = lambda p, ids: jnp.tanh(p["table"][ids] @ p["w"]) @ p["out"]
    batch = jax.random.randint(keys[3], (12,), 0, 66), jnp.arange(12) % 3
    found = {}
    for packed in (False, True):
        stats = collector(Objective(apply_fn, Categorical()), packed=packed)
        like = stats.factor_shapes(params, batch)
        tx = kfe_adam(0.1, like=like, covariance=covariance, refresh_every=2)

        @jax.jit
        def step(params, state, stats=stats, tx=tx):
            _, grads, factors = stats(params, batch)
            updates, state = tx.update(grads, state, params, factors=factors)
            return optax.apply_updates(params, updates), state

        moved, state = params, tx.init(params)
        for _ in range(3):
            moved, state = step(moved, state)
        found[packed] = moved, state, tx
    (dense_params, dense, _), (packed_params, packed, tx) = found[False], found[True]
    assert_close(packed_params, dense_params, 1e-8)
    assert packed.stacked_average.is_packed and not dense.stacked_average.is_packed
    nbytes = [sum(x.nbytes for x in jax.tree.leaves(s.stacked_average)) for s in (packed, dense)]
    assert nbytes[0] < 0.52 * nbytes[1]
    with pytest.raises(ValueError, match=r"kfe_adam: .*average is dense.*packed=False.*tx\.init"):
        tx.update(params, dense, params, factors=None)


@pytest.mark.exhaustive  # see parity_tests/soap_test.py
def test_tracked_eigenvectors_are_those_of_eigh_for_a_matrix_that_stays(problem):
    """So are kfac's: the first refresh decomposes, later ones iterate."""
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    for make in (
        lambda how: kfe_adam(0.1, like=like, refresh=how, refresh_every=1),
        lambda how: kfac(0.1, like=like, inverse=how, refresh_every=1),
    ):
        found = []
        for how in ("qr", "eigh"):
            tx = make(how)
            state = tx.init(params)
            for _ in range(3):
                updates, state = jitted(tx)(grads, state, params, factors)
            found.append(updates)
        assert_close(*found, 1e-8)


@pytest.mark.slow
def test_what_is_not_finite_is_skipped(problem):
    params, batches, like = problem
    tx = kfe_adam(0.1, like=like, others=optax.sgd(0.1, momentum=0.9))
    grads, factors = net_statistics(params, batches[0])
    _, state = tx.update(grads, tx.init(params), params, factors=factors)
    bad = jax.tree.map(lambda x: x.at[..., 0].set(jnp.nan), grads)
    for given, seen in ((bad, factors), (grads, jnp.nan * factors)):
        updates, after = tx.update(given, state, params, factors=seen)
        assert not any(x.any() for x in jax.tree.leaves(updates))
        counted = after._replace(skipped=state.skipped, watch=state.watch)
        assert_close(counted, state, 0.0)
        assert int(after.skipped) == 1


@pytest.mark.exhaustive
def test_micro_batches_are_one_batch(problem):
    params, batches, like = problem
    tx = kfe_adam(0.1, like=like, refresh_every=1)
    several = multi_steps(tx, 2)
    state, both = several.init(params), []
    for batch in batches[:2]:
        grads, factors = net_statistics(params, batch)
        both.append((grads, factors))
        updates, state = jitted(several)(grads, state, params, factors)
    total = both[0][1] + both[1][1]
    weights = [float(f.terms / total.terms) for _, f in both]
    mean = jax.tree.map(lambda x, y: weights[0] * x + weights[1] * y, *(g for g, _ in both))
    expected, _ = tx.update(mean, tx.init(params), params, factors=total)
    assert_close(updates, expected, 1e-8)


def embedding(vocabulary=12, width=4, classes=3):
    def net(p, ids):
        return jnp.tanh(p["table"][ids]).mean(1) @ p["head"]

    keys = jax.random.split(jax.random.key(2), 4)
    params = {
        "table": jax.random.normal(keys[0], (vocabulary, width)),
        "head": jax.random.normal(keys[1], (width, classes)),
    }
    batch = jax.random.randint(keys[2], (16, 5), 0, vocabulary), jnp.arange(16) % classes
    return Objective(net, Categorical()), params, batch


@pytest.mark.slow
@pytest.mark.parametrize("max_side", [pytest.param(12, marks=pytest.mark.exhaustive), 11])
def test_a_side_that_factors_keep_diagonal_takes_the_gradients_covariance(max_side):
    objective, params, batch = embedding()
    stats = collector(objective)
    _, grads, factors = stats(params, batch)
    tx = kfe_adam(0.1, like=stats.factor_shapes(params, batch), max_side=max_side, refresh="eigh")
    _, state = tx.update(grads, tx.init(params), params, factors=factors)
    vectors = state.stacked_bases["table"].a_vectors
    if max_side < 12:
        assert vectors is None
        return
    expected = grads["table"] @ grads["table"].T
    np.testing.assert_allclose(state.stacked_average["table"].a, expected, atol=1e-14)
    rotated = vectors.T @ expected @ vectors
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("max_side", [2, 1])
def test_a_side_beyond_max_side_is_not_rotated_by_the_gradients_covariance(max_side):
    """Steps along one gradient are of one size in each element that Adam sees: rotated or plain."""
    factors = random_factors((layer("w", (3, 2)),), jax.random.key(0))
    grads = {"w": jax.random.normal(jax.random.key(1), (3, 2))}
    tx = kfe_adam(0.1, like=factors, max_side=max_side, covariance="gradient", refresh="eigh")
    state = tx.init(grads)
    for _ in range(2):  # as published, the first only begins the covariance
        updates, state = tx.update(grads, state, grads, factors=None)
    basis = state.stacked_bases["w"]
    assert basis.a_vectors is None and (basis.g_vectors is None) is (max_side == 1)
    right = np.eye(2) if max_side == 1 else basis.g_vectors
    covariance = right.T @ grads["w"].T @ grads["w"] @ right
    if max_side == 2:
        np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-12)
    turned = updates["w"] @ right
    np.testing.assert_array_equal(np.sign(turned), -np.sign(grads["w"] @ right))
    np.testing.assert_allclose(np.abs(turned), np.abs(turned[0, 0]), rtol=1e-6)


def test_stacks_slices_ties_and_convolutions_move_as_one_rotated_adam_step():
    """The first step in any basis is of size one in each rotated element: g over its root."""
    layers = (
        layer("stack", (3, 4, 5), stack=1),
        layer("sliced", (2, 4, 4), name="sliced[0]", index=(0,), inputs=(0,)),
        layer("kernel", (3, 3, 2, 5), kind="conv", bias="shift"),
    )
    layers = layers[::2]
    factors = random_factors(layers, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 4)
    params = {
        "stack": jax.random.normal(keys[0], (3, 4, 5)),
        "kernel": jax.random.normal(keys[1], (3, 3, 2, 5)),
        "shift": jax.random.normal(keys[2], (5,)),
        "free": jax.random.normal(keys[3], ()),
    }
    tx = kfe_adam(1.0, like=factors, eps=1e-30)
    updates, state = tx.update(params, tx.init(params), params, factors=factors)
    for name, basis in state.stacked_bases.items():
        u = updates["stack"] if name == "stack" else updates["kernel"].reshape(18, 5)
        if name == "kernel":
            u = jnp.concatenate([u, updates["shift"][None]])
        rotated = basis.a_vectors.mT @ u @ basis.g_vectors
        np.testing.assert_allclose(abs(rotated), 1.0, atol=1e-6)
    np.testing.assert_allclose(abs(updates["free"]), 1.0, atol=1e-12)
    assert state.second["kernel"].shape == (19, 5) and state.second["free"].shape == ()


@pytest.mark.exhaustive
def test_a_tied_parameter_is_moved_once_in_the_heads_bases():
    def net(p, ids):
        return jnp.tanh(p["table"][ids]).mean(1) @ p["table"].T

    _, params, (ids, _) = embedding()
    params, batch = {"table": params["table"]}, (ids, ids[:, 0])
    stats = collector(Objective(net, Categorical()))
    _, grads, factors = stats(params, batch)
    tx = kfe_adam(0.1, like=stats.factor_shapes(params, batch))
    updates, state = tx.update(grads, tx.init(params), params, factors=factors)
    (name,) = state.second
    assert updates["table"].shape == (12, 4) and jnp.isfinite(updates["table"]).all()
    assert state.second[name].shape == (4, 12)  # as the head reads it


@pytest.mark.slow
def test_a_layer_that_gets_no_gradient_stays_and_others_look_after_what_is_not_covered(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    grads = grads | {"head": jax.tree.map(jnp.zeros_like, grads["head"])}
    more, pull = params | {"free": jnp.ones(2)}, grads | {"free": jnp.ones(2)}
    tx = kfe_adam(0.1, like=like, others=optax.sgd(0.5))
    updates, _ = tx.update(pull, tx.init(more), more, factors=factors)
    assert not any(x.any() for x in jax.tree.leaves(updates["head"]))
    np.testing.assert_allclose(updates["free"], -0.5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", [2.3, -5.0, 0.0])
def test_a_loss_out_of_bounds_is_counted_and_said_once(problem, start):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    for make in (kfe_adam, kfac):
        tx = make(0.1, like=like)
        state = tx.init(params)
        bound = start + 10 * max(abs(start), 1)

        def update(state, value, tx=tx):
            return tx.update(grads, state, params, factors=factors, value=value)[1]

        for value in (start, bound, start - 100):
            state = update(state, value)
            assert int(state.diverged) == 0
        for i in range(9):
            state = update(state, jnp.nan if i % 2 else bound + 0.1)
        assert int(state.diverged) == 9
        check_state(state)
        with pytest.warns(UserWarning, match="diverged"):
            state = update(state, jnp.inf)
        with pytest.warns(UserWarning, match="learning rate"):
            check_state(state)
        state = update(state, start)
        assert int(state.diverged) == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"learning_rate": -0.1}, "learning_rate"),
        ({"learning_rate": jnp.nan}, "learning_rate"),
        ({"b1": 1.0}, "b1"),
        ({"b2": -0.1}, "b2"),
        ({"eps": 0.0}, "eps"),
        ({"refresh_every": 0}, "refresh_every"),
        ({"max_side": -1}, "max_side"),
        ({"decay": 1.0}, "decay"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(problem, options, match):
    *_, like = problem
    rate = options.pop("learning_rate", 0.1) if "learning_rate" in options else 0.1
    with pytest.raises(ValueError, match=match):
        kfe_adam(rate, like=like, **options)


def test_what_does_not_belong_is_refused(problem):
    params, batches, like = problem
    grads, factors = net_statistics(params, batches[0])
    tx = kfe_adam(0.1, like=like)
    state = tx.init(params)
    with pytest.raises(TypeError, match="factors="):
        tx.update(grads, state, params)
    with pytest.raises(TypeError, match="KfeAdamState"):
        tx.update(grads, kfac(0.1, like=like).init(params), params, factors=factors)
    with pytest.raises(TypeError, match="KfacState"):
        kfac(0.1, like=like).update(grads, state, params, factors=factors)
    other = dataclasses.replace(factors, layers=factors.layers[::-1])
    with pytest.raises(ValueError, match="factors"):
        tx.update(grads, state, params, factors=other)
    with pytest.raises(ValueError, match="covariance="):
        kfe_adam(0.1, like=like, covariance="gradient").update(grads, state, params, factors=None)
    with pytest.raises(ValueError, match="weight_decay needs"):
        kfe_adam(0.1, like=like, weight_decay=0.1).update(grads, state, factors=factors)


@pytest.mark.exhaustive
def test_one_step_of_bfloat16_parameters_stays_bfloat16():
    x = jax.random.normal(jax.random.key(0), (16, 6), jnp.float32)
    params = {"w": jax.random.normal(jax.random.key(1), (6, 3), jnp.bfloat16)}
    objective = Objective(lambda p, x: x.astype(jnp.bfloat16) @ p["w"], Gaussian())
    stats = collector(objective)
    batch = (x, jnp.zeros((16, 3), jnp.bfloat16))
    _, grads, factors = stats(params, batch)
    tx = kfe_adam(0.1, like=stats.factor_shapes(params, batch))
    updates, state = tx.update(grads, tx.init(params), params, factors=factors)
    assert updates["w"].dtype == jnp.bfloat16 and jnp.isfinite(updates["w"]).all()
    assert state.second["w"].dtype == jnp.float32
