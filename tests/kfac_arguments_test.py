"""What ``jk.kfac`` refuses in each of its two forms, and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

X, Y = jax.random.normal(jax.random.key(0), (8, 3)), jnp.arange(8) % 4
BATCH = X, Y
PARAMS = {"w": 0.5 * jax.random.normal(jax.random.key(1), (3, 4))}
OBJECTIVE = jk.Objective(lambda p, x: x @ p["w"], jk.Categorical())
STATS = jk.value_grad_and_factors(OBJECTIVE, fisher="mc")
LIKE = STATS.factor_shapes(PARAMS, BATCH)
KEY = jax.random.key(2)
_, GRADS, FACTORS = STATS(PARAMS, BATCH, KEY)
OTHER = {"v": jnp.ones((5, 4))}
OTHER_STATS = jk.value_grad_and_factors(jk.Objective(lambda p, x: x @ p["v"], jk.Categorical()))
OTHER_FACTORS = OTHER_STATS(OTHER, (jnp.ones((8, 5)), Y)).factors


def updated(tx, state=None, params=PARAMS, factors=FACTORS, **more):
    state = tx.init(PARAMS) if state is None else state
    return tx.update(GRADS, state, params, factors=factors, **more)


@pytest.mark.slow
def test_a_step_whose_norm_overflows_is_not_taken():
    """Steps that are scaled to the constraint do not depend on the length of the gradient."""
    constrained = jk.kfac(0.1, like=LIKE, norm_constraint=1e-6)
    state = constrained.init(PARAMS)
    expected, _ = constrained.update(GRADS, state, PARAMS, factors=FACTORS)
    for size, taken in ((1e15, 1), (1e20, 0), (1e30, 0)):
        large = jax.tree.map(lambda x, size=size: x * jnp.float32(size), GRADS)
        updates, _ = constrained.update(large, state, PARAMS, factors=FACTORS)
        np.testing.assert_allclose(updates["w"], taken * expected["w"], rtol=1e-5)


@pytest.mark.parametrize("period", [2.5, jnp.float32(1.5), jnp.nan])
def test_a_period_with_a_fraction_is_refused(period):
    """A whole step is a multiple of 2.5 at every fifth step only."""
    with pytest.raises(ValueError, match="refresh_every"):
        jk.kfac(0.1, like=LIKE, refresh_every=period)
    jk.kfac(0.1, like=LIKE, refresh_every=2.0)


# ------------------------------------------------------------------ rates


@pytest.mark.parametrize("rate", [-0.1, -jnp.inf, jnp.inf, jnp.nan, jnp.float32(jnp.inf)])
def test_a_rate_that_is_negative_or_not_finite_is_refused_when_built(rate):
    with pytest.raises(ValueError, match=r"learning_rate must be finite, zero or positive, got"):
        jk.kfac(rate, like=LIKE)


@pytest.mark.slow
def test_a_rate_of_zero_holds_the_parameters_still_as_in_optax():
    """The average and the bases go on; with a schedule, zero is where a warmup begins."""
    for rate in (0, 0.0, lambda step: 0.0):
        updates, state = updated(jk.kfac(rate, like=LIKE))
        np.testing.assert_array_equal(updates["w"], np.zeros((3, 4)))
        assert int(state.step) == 1 and float(state.average.terms) > 0
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.momentum))


# ------------------------------------------------------------------ defaults


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["exact", "factored"])
def test_a_rate_brings_a_damping_and_a_constraint_that_can_be_undone(mode):
    named = {"damping": 0.1, "norm_constraint": 1e-2, "momentum": 0.9}
    found, _ = updated(jk.kfac(0.1, like=LIKE, damping_mode=mode))
    wanted, _ = updated(jk.kfac(0.1, like=LIKE, damping_mode=mode, **named))
    np.testing.assert_array_equal(found["w"], wanted["w"])
    free, _ = updated(jk.kfac(10.0, like=LIKE, damping_mode=mode, norm_constraint=None))
    bound, _ = updated(jk.kfac(10.0, like=LIKE, damping_mode=mode))
    assert jnp.linalg.norm(bound["w"]) < 0.1 * jnp.linalg.norm(free["w"])


@pytest.mark.slow
def test_a_rate_alone_is_damped_exactly():
    found, _ = updated(jk.kfac(0.1, like=LIKE))
    wanted, _ = updated(jk.kfac(0.1, like=LIKE, damping_mode="exact"))
    np.testing.assert_array_equal(found["w"], wanted["w"])


@pytest.mark.slow
def test_no_number_is_the_quadratic_model_with_an_adapted_damping():
    rule = jk.LevenbergMarquardt()
    named = {"damping": rule, "momentum": "quadratic", "damping_mode": "pi"}
    more = STATS.adaptation(PARAMS, BATCH, KEY)
    found, state = updated(jk.kfac(like=LIKE), **more)
    wanted, _ = updated(jk.kfac("quadratic", like=LIKE, norm_constraint=None, **named), **more)
    np.testing.assert_array_equal(found["w"], wanted["w"])
    assert float(state.adaptation.learning_rate) > 0


# ------------------------------------------------------------------ updates


@pytest.mark.slow
@pytest.mark.parametrize("rate", [{}, {"learning_rate": 0.1}], ids=["adaptive", "fixed"])
def test_factors_are_asked_for_by_name(rate):
    """``None`` says that there are none; leaving them out was gradient descent without a word."""
    tx = jk.kfac(like=LIKE, **rate)
    more = {} if rate else STATS.adaptation(PARAMS, BATCH, KEY)
    with pytest.raises(TypeError, match=r"update needs factors=.*factors=None says that"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, **more)
    updates, state = updated(tx, factors=None, **more)
    assert int(state.step) == 1 and float(jnp.abs(updates["w"]).max()) > 0


def test_an_adaptive_update_names_what_it_lacks_and_how_to_give_it():
    tx = jk.kfac(like=LIKE)
    with pytest.raises(ValueError, match=r"value and value_fn and curvature.*stats\.adaptation"):
        updated(tx)
    more = STATS.adaptation(PARAMS, BATCH, KEY)
    del more["curvature"]
    with pytest.raises(ValueError, match=r"needs curvature: .*\*\*stats\.adaptation"):
        updated(tx, **more)


def elsewhere():
    return {"w": PARAMS["w"] + 1}


@pytest.mark.parametrize("params", [elsewhere(), OTHER | {"v": jnp.ones((3, 4))}, {"w": X}],
                         ids=["values", "paths", "shapes"])  # fmt: skip
def test_adaptation_of_other_parameters_is_refused(params):
    more = STATS.adaptation(PARAMS, BATCH, KEY)
    more["curvature"] = more["curvature"]._replace(params=params)
    with pytest.raises(
        ValueError, match=r"stats\.adaptation.*computed at other parameters than the update"
    ):
        updated(jk.kfac(like=LIKE), **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_parameters_with_a_nan_are_those_of_the_update(dtype):
    params, same = ({"w": jnp.array([1.0, jnp.nan], dtype)} for _ in range(2))
    jk.factors.BatchCurvature(None, params, None, None, None).check_params(same)


def test_values_of_numpy_parameters_are_compared_too():
    curvature = jk.factors.BatchCurvature(None, {"w": np.ones(2)}, None, None, None)
    curvature.check_params({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="computed at other parameters"):
        curvature.check_params({"w": np.zeros(2)})


def test_parameters_that_have_moved_on_are_refused_where_values_are_known():
    more = STATS.adaptation(elsewhere(), BATCH, KEY)
    with pytest.raises(ValueError, match=r"at other parameters than the update"):
        updated(jk.kfac(like=LIKE), **more)


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("rows", [4, 16])
def test_adaptation_of_another_batch_is_refused_by_its_number_of_loss_terms(rows):
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x])[:rows], BATCH)
    more = STATS.adaptation(PARAMS, batch, KEY)
    with pytest.raises(ValueError, match=rf"batch of {rows} loss terms.*gradient from 8"):
        updated(jk.kfac(like=LIKE), **more)


def test_the_loss_terms_of_factors_in_numpy_arrays_are_compared_too():
    more = STATS.adaptation(PARAMS, jax.tree.map(lambda x: x[:4], BATCH), KEY)
    with pytest.raises(ValueError, match=r"batch of 4 loss terms.*gradient from 8"):
        updated(jk.kfac(like=LIKE), factors=jax.device_get(FACTORS), **more)


@pytest.mark.parametrize("rate", [{}, {"learning_rate": 0.1}], ids=["adaptive", "fixed"])
def test_a_value_of_two_numbers_is_refused(rate):
    """Other types: ``wrong_arguments_test.py``."""
    more = {} if rate else dict(STATS.adaptation(PARAMS, BATCH, KEY))
    with pytest.raises(TypeError, match=r"value: expected the loss of this batch, a number"):
        updated(jk.kfac(like=LIKE, **rate), **(more | {"value": jnp.ones(2)}))


@pytest.mark.parametrize("rate", [{}, {"learning_rate": 0.1}], ids=["adaptive", "fixed"])
def test_factors_of_another_model_are_refused(rate):
    more = {} if rate else STATS.adaptation(PARAMS, BATCH, KEY)
    with pytest.raises(ValueError, match=r"factors.*'?v'?"):
        updated(jk.kfac(like=LIKE, **rate), factors=OTHER_FACTORS, **more)


def test_a_state_of_the_other_form_is_refused():
    """Where both keep eigenvectors; else what is kept tells them apart already."""
    adaptive, fixed = jk.kfac(like=LIKE), jk.kfac(0.1, like=LIKE)
    more = STATS.adaptation(PARAMS, BATCH, KEY)
    for ours, others, given in ((adaptive, fixed, more), (fixed, adaptive, {})):
        with pytest.raises(ValueError, match=r"the state .*tx\.init\(params"):
            updated(ours, others.init(PARAMS), **given)
    both = jk.kfac(like=LIKE, damping_mode="exact")
    with pytest.raises(ValueError, match=r"state does not adapt itself, and this kfac does: make"):
        updated(both, fixed.init(PARAMS), **more)
    with pytest.raises(ValueError, match=r"state adapts itself, and this kfac does not: make"):
        updated(fixed, both.init(PARAMS))
