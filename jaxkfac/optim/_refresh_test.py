import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

from jaxkfac.blocks import zeros_like
from jaxkfac.blocks._random_factors_test import layer, random_factors
from jaxkfac.optim import kfac
from jaxkfac.optim._kfac_test import assert_close, jitted

pytestmark = pytest.mark.usefixtures("x64")

LAYERS = tuple(layer(f"{n}", (n, 2)) for n in (3, 4, 5, 6)) + (layer("shares", (3, 3), input="3"),)


@pytest.fixture
def params():
    return {x.name: jnp.ones(x.weight.atoms) for x in LAYERS}


@pytest.fixture
def batches():
    return [random_factors(LAYERS, jax.random.key(i)) for i in range(9)]


def held(state):
    """What is kept of each layer."""
    kept = state.stacked_bases
    values = kept.g if isinstance(next(iter(kept.g.values())), jax.Array) else None
    return values or {name: x.values for name, x in kept.g.items()}


def states(tx, params, steps):
    step, out = jitted(tx), [tx.init(params)]
    for factors in steps:
        out.append(step(params, out[-1], params, factors)[1])
    return out


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["exact", "pi"])
@pytest.mark.parametrize("every", [2, 3, 7])
def test_staggered_layers_are_refreshed_in_turn_each_after_the_same_time(
    params, batches, mode, every
):
    tx = kfac(
        0.1, like=batches[0], damping=0.1, damping_mode=mode, refresh_every=every, stagger=True
    )
    whole = kfac(0.1, like=batches[0], damping=0.1, damping_mode=mode, refresh_every=1)
    found, fresh = states(tx, params, batches), states(whole, params, batches)
    changed = {
        name: [
            t
            for t in range(9)
            if not np.array_equal(held(found[t])[name], held(found[t + 1])[name])
        ]
        for name in params
    }
    for name, steps in changed.items():
        offset = steps[1] % every
        assert steps == sorted({0, *range(offset, 9, every)}), name
        for t in steps:  # from the average of that step
            assert np.allclose(held(found[t + 1])[name], held(fresh[t + 1])[name], rtol=1e-12)
    assert changed["3"] == changed["shares"]
    assert len({tuple(steps) for steps in changed.values()}) == min(every, 4)


@pytest.mark.exhaustive
def test_a_staggered_refresh_of_every_step_is_a_refresh_of_every_step(params, batches):
    options = {"like": batches[0], "damping": 0.1, "refresh_every": 1}
    for mode in ("exact", "pi"):
        whole, parts = (
            states(kfac(0.1, damping_mode=mode, stagger=on, **options), params, batches)[-1]
            for on in (False, True)
        )
        # Two programs: XLA fuses the averages with what reads them, differently in each.
        assert_close(parts, whole, 1e-13)


@pytest.mark.exhaustive
def test_left_out_factors_and_counts_of_zero_are_the_same(params, batches):
    """A refresh without new factors takes the average as it is."""
    tx = kfac(0.1, like=batches[0], damping=0.1, refresh_every=2, decay=0.5)
    zeros, left = tx.init(params), tx.init(params)
    alone = jax.jit(lambda g, s, p: tx.update(g, s, p, factors=None))
    for t in range(5):
        factors = batches[t] if t == 1 else None
        if factors is None:
            expected, zeros = jitted(tx)(params, zeros, params, zeros_like(batches[0]))
            found, left = alone(params, left, params)
        else:
            expected, zeros = jitted(tx)(params, zeros, params, factors)
            found, left = jitted(tx)(params, left, params, factors)
        assert_close(found, expected, 1e-14)
        assert_close(left, zeros, 1e-14)
    assert int(left.step) == 5 and not np.array_equal(held(left)["4"], jnp.ones(2))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [2, 3, 5])
def test_periods_that_never_meet_still_refresh_from_what_there_is(params, batches, every):
    """Factors at odd steps, a refresh at multiples of ``every``: also where both are even."""
    tx = kfac(0.1, like=batches[0], damping=0.1, refresh_every=every, decay=0.5)
    steps = [f if t % 2 else zeros_like(f) for t, f in enumerate(batches)]
    seen = states(tx, params, steps)
    changed = [
        t for t in range(9) if not np.array_equal(held(seen[t])["4"], held(seen[t + 1])["4"])
    ]
    # At step 2 the average is still that of step 1.
    assert changed == sorted({1, *range(every, 9, every)} - {2})


KEPT = [
    ("pi", True),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (("pi", False), ("exact", True), ("exact", False))
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mode", "stagger"), KEPT)
def test_vmap_refreshes_each_state_when_it_is_due(params, batches, mode, stagger):
    """States of several ages, of which some are due for a refresh and some are not."""
    options = {"damping": 0.1, "damping_mode": mode, "refresh_every": 3, "stagger": stagger}
    tx = kfac(0.1, like=batches[0], **options)
    seen = states(tx, params, batches[:4])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *seen)
    found = jax.jit(
        jax.vmap(lambda state, f: tx.update(params, state, params, factors=f), (0, None))
    )(stacked, batches[4])
    alone = [jitted(tx)(params, state, params, batches[4]) for state in seen]
    assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *alone), 1e-12)
    renewed = [
        any(not np.array_equal(held(new)[name], held(old)[name]) for name in params)
        for old, (_, new) in zip(seen, alone, strict=True)
    ]
    assert stagger or renewed == [True, False, False, True, False]


@pytest.mark.exhaustive  # _kfe_adam_test.py has it
@pytest.mark.parametrize(("mode", "stagger"), KEPT)
def test_a_state_saved_between_two_refreshes_goes_on_bit_for_bit(params, batches, mode, stagger):
    options = {"damping": 0.1, "damping_mode": mode, "refresh_every": 3, "stagger": stagger}
    tx = kfac(0.1, like=batches[0], **options)
    whole = states(tx, params, batches)
    saved = serialization.to_bytes(whole[5])  # refreshes before steps 3 and 6
    again = kfac(0.1, like=batches[0], **options)  # as in a new process
    state = serialization.from_bytes(again.init(params), saved)
    for factors in batches[5:]:
        _, state = jitted(again)(params, state, params, factors)
    assert_close(state, whole[-1], 0.0)


@pytest.mark.exhaustive
def test_a_refresh_has_derivatives_in_both_modes(params, batches):
    tx = kfac(0.1, like=batches[0], damping=0.1, damping_mode="pi")

    def moved(scale):
        factors = jax.tree.map(lambda x: x * scale, batches[0])
        factors = dataclasses.replace(factors, terms=batches[0].terms)
        updates, _ = tx.update(params, tx.init(params), params, factors=factors)
        return sum(x.sum() for x in updates.values())

    difference = (jax.jit(moved)(1.0 + 1e-6) - jax.jit(moved)(1.0 - 1e-6)) / 2e-6
    assert abs(difference) > 1e-3
    for derivative in (jax.grad, jax.jacfwd):
        assert np.allclose(jax.jit(derivative(moved))(1.0), difference, rtol=1e-6)


def test_a_traced_period_cannot_be_staggered(params, batches):
    tx = optax.inject_hyperparams(kfac, static_args=("like", "stagger", "max_condition", "floor"))(
        0.1, like=batches[0], refresh_every=2, stagger=True
    )
    with pytest.raises(TypeError, match="stagger=True divides.*static_args"):
        jax.jit(tx.update)(params, jax.eval_shape(tx.init, params), params, factors=batches[0])
