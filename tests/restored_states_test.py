"""States of optimizers come back from files as lists, tuples or leaves, and go on."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk


def as_list(state):
    return list(state)


def as_tuple(state):
    return tuple(state)


def through_savez(state):
    """As FermiNet saves it: an array of objects, which comes back as a list."""
    file = io.BytesIO()
    np.savez(file, opt_state=np.asarray(state, dtype=object))
    file.seek(0)
    return np.load(file, allow_pickle=True)["opt_state"].tolist()


def through_leaves(state):
    leaves, structure = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *leaves)
    file.seek(0)
    loaded = np.load(file)
    return jax.tree.unflatten(structure, [loaded[f"arr_{k}"] for k in range(len(leaves))])


SAVED = {
    "kfac": lambda: jk.kfac(0.1),
    "adaptive": jk.kfac,
    "kfe_adam": lambda: jk.kfe_adam(1e-2),
}


@pytest.mark.default(1, slow=6)
@pytest.mark.parametrize("form", [as_list, as_tuple, through_savez, through_leaves])
@pytest.mark.parametrize("name", SAVED)
def test_a_state_from_a_file_takes_the_same_step(name, form):
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), jk.Gaussian())
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    batch = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), jnp.ones((4, 2))
    stats, tx = jk.value_grad_and_factors(objective), SAVED[name]()

    @jax.jit
    def step(params, state):
        _, grads, extra = stats.step(params, batch)
        return tx.update(grads, state, params, **extra)

    like = stats.factor_shapes(params, batch)
    assert like["w"].a.shape == (4, 4) and like["w"].g.shape == (2, 2)
    _, state = step(params, tx.init(params, like=like))
    expected, found = step(params, state), step(params, form(state))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", [[], (1, 2), {"step": 1}])
def test_other_lists_are_refused(wrong):
    tx = jk.kfac(0.1)
    with pytest.raises(TypeError, match="kfac: the state: expected KfacState"):
        tx.update({"w": jnp.ones((3, 2))}, wrong, {"w": jnp.ones((3, 2))})


@pytest.mark.slow
@pytest.mark.parametrize("form", [as_list, as_tuple])
def test_a_state_of_the_optimizer_object_too(form):
    objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
    params, batch = {"w": jnp.ones((3, 2))}, (jnp.ones((4, 3)), jnp.ones((4, 2)))
    opt = jk.Optimizer(objective)
    params, state, _ = opt.step(params, opt.init(params, batch), batch, jax.random.key(0))
    expected = opt.step(params, state, batch, jax.random.key(1))
    found = opt.step(params, form(state), batch, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])
