"""The loops people have: NNX's optimizer, TrainState, Equinox, optax's wrappers, checkpoints.

Each does what ``tx.update`` and ``optax.apply_updates`` do. ``docs/loops.md`` shows them.
"""

import ast
import dataclasses
import difflib
import functools
import re
from pathlib import Path

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxkfac as jk

X = jax.random.normal(jax.random.key(0), (8, 3))
Y = jnp.arange(8) % 4
PARAMS = {
    "up": {"w": 0.5 * jax.random.normal(jax.random.key(1), (3, 5)), "b": jnp.zeros(5)},
    "scale": jnp.ones(5),
    "down": {"w": 0.5 * jax.random.normal(jax.random.key(2), (5, 4))},
}
STEPS = 4


def apply_fn(p, x):
    return (jnp.tanh(x @ p["up"]["w"] + p["up"]["b"]) * p["scale"]) @ p["down"]["w"]


OBJECTIVE = jk.Objective(apply_fn, jk.Categorical())
STATS = jk.value_grad_and_factors(OBJECTIVE)
LIKE = STATS.factor_shapes(PARAMS, (X, Y))
OPTIONS = {"like": LIKE, "refresh_every": 2}


def trained(tx, params=PARAMS, steps=STEPS, at_step=lambda state, number: state):
    """The parameters and the state after plain steps."""

    @jax.jit
    def step(params, state):
        _, grads, factors = STATS(params, (X, Y))
        updates, state = tx.update(grads, state, params, factors=factors)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in range(steps):
        params, state = step(params, at_step(state, number))
    return params, state


@functools.cache
def expected():
    return trained(jk.kfac(0.1, damping=1e-2, **OPTIONS))[0]


def assert_close(found, wanted, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, wanted)


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)


# ------------------------------------------------------------------ frameworks


class Net(nnx.Module):
    """The same net, its parameters under the same names."""

    def __init__(self):
        self.up = nnx.Dict(w=nnx.Param(PARAMS["up"]["w"]), b=nnx.Param(PARAMS["up"]["b"]))
        self.scale = nnx.Param(PARAMS["scale"])
        self.down = nnx.Dict(w=nnx.Param(PARAMS["down"]["w"]))

    def __call__(self, x):
        hidden = jnp.tanh(x @ self.up["w"][...] + self.up["b"][...]) * self.scale[...]
        return hidden @ self.down["w"][...]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["dictionary", "state"])
def test_nnx_optimizer_steps_as_the_plain_loop_does(form):
    model = Net()
    run, params = jk.from_nnx(model)
    stats = jk.value_grad_and_factors(jk.Objective(run, jk.Categorical()))
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, (X, Y)), damping=1e-2, refresh_every=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        params = nnx.state(model, nnx.Param)
        if form == "dictionary":
            _, grads, factors = stats(nnx.to_pure_dict(params), (X, Y))
            grads = jk.as_state(grads, model)
        else:
            _, grads, factors = stats(params, (X, Y))
        optimizer.update(model, grads, factors=factors)

    for _ in range(STEPS):
        step(model, optimizer)
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected())


@pytest.mark.slow
def test_train_state_steps_as_the_plain_loop_does():
    class State(TrainState):
        def apply_gradients(self, *, grads, **extra):
            update = functools.partial(self.tx.update, **extra)
            bound = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
            return super(State, bound).apply_gradients(grads=grads).replace(tx=self.tx)

    tx = jk.kfac(0.1, damping=1e-2, **OPTIONS)
    state = State.create(apply_fn=apply_fn, params=PARAMS, tx=tx)

    @jax.jit
    def step(state):
        _, grads, factors = STATS(state.params, (X, Y))
        return state.apply_gradients(grads=grads, factors=factors)

    for _ in range(STEPS):
        state = step(state)
    assert state.step == STEPS and state.tx is tx
    assert_close(state.params, expected())


@pytest.mark.slow
def test_equinox_filtered_loop_steps_as_the_plain_loop_does():
    class Module(eqx.Module):
        up: dict
        scale: jax.Array
        down: dict
        activation: object

        def __call__(self, x):
            hidden = self.activation(x @ self.up["w"] + self.up["b"])
            return (hidden * self.scale) @ self.down["w"]

    model = Module(**PARAMS, activation=jnp.tanh)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    objective = jk.Objective(
        lambda params, x: jax.vmap(eqx.combine(params, static))(x), jk.Categorical()
    )
    stats = jk.value_grad_and_factors(objective)
    tx = jk.kfac(0.1, like=stats.factor_shapes(params, (X, Y)), damping=1e-2, refresh_every=2)
    state = tx.init(params)

    @eqx.filter_jit
    def step(model, state):
        params = eqx.filter(model, eqx.is_inexact_array)
        _, grads, factors = stats(params, (X, Y))
        updates, state = tx.update(grads, state, params, factors=factors)
        return eqx.apply_updates(model, updates), state

    for _ in range(STEPS):
        model, state = step(model, state)
    assert_close({"up": model.up, "scale": model.scale, "down": model.down}, expected())


# ------------------------------------------------------------------ optax


@pytest.mark.slow
def test_injected_numbers_are_those_that_were_given():
    tx = optax.inject_hyperparams(jk.kfac)(0.1, damping=1e-2, **OPTIONS)
    assert_close(trained(tx)[0], expected())


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # a float divided by the step
def test_injected_numbers_change_in_flight():
    """As schedules of the same values change them."""

    def change(state, number):
        hyperparams = {"learning_rate": 0.1 / (1 + number), "damping": 10.0**-number}
        new = {k: jnp.asarray(v, jnp.float32) for k, v in hyperparams.items()}
        return state._replace(hyperparams=state.hyperparams | new)

    tx = optax.inject_hyperparams(jk.kfac)(0.5, damping=0.5, **OPTIONS)
    scheduled = jk.kfac(lambda n: 0.1 / (1 + n), damping=lambda n: 10.0**-n, **OPTIONS)
    found = trained(tx, at_step=change)
    assert_close(found[0], trained(scheduled)[0])
    assert "max_condition" in found[1].hyperparams


@pytest.mark.slow
def test_injected_numbers_outside_of_jit_are_checked():
    numbers = {"damping": 1e-3, "momentum": 0.9, "norm_constraint": None, "decay": 0.9}
    tx = optax.inject_hyperparams(jk.kfac)(0.1, **numbers, **OPTIONS)
    state = tx.init(PARAMS)
    _, grads, factors = STATS(PARAMS, (X, Y))
    for name, value in {"damping": -1.0, "momentum": 1.0, "decay": 2.0, "floor": -1.0}.items():
        wrong = state._replace(hyperparams=state.hyperparams | {name: jnp.asarray(value)})
        with pytest.raises(ValueError, match=name):
            tx.update(grads, wrong, PARAMS, factors=factors)
    other = state._replace(hyperparams=state.hyperparams | {"max_condition": jnp.asarray(10.0)})
    with pytest.raises(ValueError, match=r"state was made with max_condition=1000000\.0"):
        tx.update(grads, other, PARAMS, factors=factors)
    with pytest.raises(TypeError, match=r"static_args=\('max_condition', 'floor'\)"):
        jax.jit(tx.init)(PARAMS)


@pytest.mark.slow
def test_chain_hands_factors_to_kfac_alone():
    tx = optax.chain(optax.scale(2.0), jk.kfac(0.05, damping=1e-2, **OPTIONS))
    assert_close(trained(tx)[0], expected())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("by", ["masked", "partition"])
def test_the_parameters_of_a_mask_are_stepped_and_the_others_left_to_others(by):
    ours = {"up": True, "scale": False, "down": True}
    kfac = jk.kfac(0.1, damping=1e-2, norm_constraint=None, **OPTIONS)  # which spans the leaves
    if by == "masked":
        tx = optax.chain(optax.masked(kfac, ours), optax.masked(optax.sgd(0.3), _not(ours)))
    else:
        labels = {name: "kfac" if mine else "sgd" for name, mine in ours.items()}
        tx = optax.partition({"kfac": kfac, "sgd": optax.sgd(0.3)}, labels)
    _, grads, factors = STATS(PARAMS, (X, Y))
    found, _ = tx.update(grads, tx.init(PARAMS), PARAMS, factors=factors)
    whole, _ = kfac.update(grads, kfac.init(PARAMS), PARAMS, factors=factors)
    assert_close(found, whole | {"scale": -0.3 * grads["scale"]})


def _not(mask):
    return {name: not mine for name, mine in mask.items()}


# ------------------------------------------------------------------ state


def states():
    """States that hold factors, bases or both, with what they were made for."""
    _, grads, factors = STATS(PARAMS, (X, Y))
    bases = jk.eigendecompose(factors)
    kfac = jk.kfac(0.1, **OPTIONS, others=optax.adam(1e-3))
    several = jk.multi_steps(kfac, 2)
    for name, tx in {"kfac": kfac, "multi_steps": several}.items():
        state = tx.init(PARAMS)
        yield name, state, tx.update(grads, state, PARAMS, factors=factors)[1]
    objective = jk.Objective(apply_fn, jk.Categorical())
    corrected = jk.correct_eigenvalues(objective, bases)(PARAMS, (X, Y))
    yield "bases", jax.tree.map(jnp.zeros_like, corrected), corrected


@pytest.mark.exhaustive
@pytest.mark.standard_promotion  # optax.adam multiplies floats by its step
def test_states_are_written_and_read_by_flax_serialization():
    for name, target, state in states():
        written = flax.serialization.to_bytes(state)
        assert_same(flax.serialization.from_bytes(target, written), state), name


def test_bytes_of_another_model_are_refused():
    wide = PARAMS | {"down": {"w": jnp.ones((5, 7))}}
    tx = jk.kfac(0.1, like=STATS.factor_shapes(wide, (X, Y)))
    written = flax.serialization.to_bytes(jk.kfac(0.1, **OPTIONS).init(PARAMS))
    with pytest.raises(ValueError, match=r"belong to another model.*\(4, 4\).*\(7, 7\)"):
        flax.serialization.from_bytes(tx.init(wide), written)


@pytest.mark.slow
def test_bytes_with_and_without_what_is_optional_are_told_apart():
    *_, factors = STATS(PARAMS, (X, Y))
    bases = jk.eigendecompose(factors)
    corrected = jk.correct_eigenvalues(OBJECTIVE, bases)(PARAMS, (X, Y))
    counted = dataclasses.replace(factors, loss_terms=factors.terms)
    for name, bare, full in (("corrections", bases, corrected), ("loss_terms", factors, counted)):
        for target in (bare, full):
            written = flax.serialization.to_bytes(target)
            assert_same(flax.serialization.from_bytes(target, written), target)
        with pytest.raises(ValueError, match=f"hold {name}, and the target has {name}=None"):
            flax.serialization.from_bytes(bare, flax.serialization.to_bytes(full))
        with pytest.raises(ValueError, match=f"hold no {name}.*replace.target, {name}=None"):
            flax.serialization.from_bytes(full, flax.serialization.to_bytes(bare))
    earlier = flax.serialization.to_state_dict(bases) | {"corrections": None}
    assert_same(flax.serialization.from_state_dict(bases, earlier), bases)


@pytest.mark.exhaustive
def test_a_state_goes_through_jax_tree_and_trains_on():
    tx = jk.kfac(0.1, damping=1e-2, **OPTIONS)
    params, state = trained(tx, steps=2)
    leaves, structure = jax.tree.flatten(state)
    again = jax.tree.map(lambda x: x, jax.tree.unflatten(structure, leaves))
    assert_same(again, state)
    found, _ = trained(tx, params, 2, lambda fresh, number: again if number == 0 else fresh)
    assert_same(found, expected())


# ------------------------------------------------------------------ precision


@pytest.mark.exhaustive
def test_updates_that_bfloat16_would_lose_are_kept_by_float32_masters():
    def half(p, x):
        return apply_fn(optax.tree.cast(p, jnp.bfloat16), x.astype(jnp.bfloat16))

    def moved(params, run):
        stats = jk.value_grad_and_factors(jk.Objective(run, jk.Categorical()))
        tx = jk.kfac(1e-4, like=stats.factor_shapes(params, (X, Y)), momentum=0.0)
        start, state = params, tx.init(params)

        @jax.jit
        def step(params, state):
            _, grads, factors = stats(params, (X, Y))
            updates, state = tx.update(grads, state, params, factors=factors)
            return optax.apply_updates(params, updates), state

        for _ in range(20):
            params, state = step(params, state)
        moves = jax.tree.map(lambda a, b: jnp.abs(a - b).max().astype(jnp.float32), params, start)
        return moves["scale"], jax.tree.map(lambda x: x.dtype, params)["scale"]

    kept, dtype = moved(PARAMS, half)
    lost, narrow = moved(optax.tree.cast(PARAMS, jnp.bfloat16), half)
    assert (dtype, narrow) == (jnp.float32, jnp.bfloat16)
    assert lost == 0 and kept > 1e-4


# ------------------------------------------------------------------ the page

PAGE = (Path(__file__).parent.parent / "docs" / "loops.md").read_text()
BLOCK = r"```python\n((?:(?!```).)*?)```\n"
PAIRS = re.findall(BLOCK + r"\nWith K-FAC:\n\n" + BLOCK, PAGE, re.DOTALL)


def test_the_page_shows_every_framework_with_the_object():
    code = "".join(re.findall(BLOCK, PAGE, re.DOTALL))
    words = (
        "jk.Optimizer(jk.Objective(model.apply",
        "jk.from_nnx(net, mutable=nnx.BatchStat)",
        "nn.BatchNorm",
        "jk.TrainState.create",
        "eqx.combine",
        "eqx.nn.make_with_state",
        "hk.transform_with_state",
        "nnx.Optimizer",
        "state.apply_gradients(grads=grads, **extra)",
        "jk.multi_steps",
    )
    assert all(word in code for word in words)


@pytest.mark.parametrize(("plain", "with_factors"), PAIRS)
def test_the_loop_of_optax_changes_five_lines_and_adds_one(plain, with_factors):
    """The new one is ``jk.check_state``."""
    # A statement is a line here, however the page wraps it.
    one, two = (ast.unparse(ast.parse(text)).splitlines() for text in (plain, with_factors))
    changes = list(difflib.ndiff(one, two))
    added = [line[2:].strip() for line in changes if line.startswith("+ ") and line != "+ "]
    assert added.count("jk.check_state(state)") == 1 and len(added) == 6


def test_every_loop_on_the_page_is_watched_and_checks_its_loss():
    blocks = re.findall(BLOCK, PAGE, re.DOTALL)
    loops = [text for text in blocks if "losses = []" in text or "losses = opt.init" in text]
    assert len(PAIRS) == 1 and len(loops) == 8
    for text in loops:
        assert ("jk.check_state(" in text) or "optax.adam" in text
        assert "assert losses[-1] < losses[0]" in text
    calls = (x for text in blocks for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Call))
    made = [text for text in map(ast.unparse, calls) if "value_grad_and_factors(" in text]
    assert len(made) > 6
    outside = "jk.Objective(normalised, jk.Categorical())"  # factors alone
    assert all("fisher='mc'" in x for x in made if outside not in x and "jk.Objective" in x)
