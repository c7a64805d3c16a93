"""Programs with mutable arrays and effects: nothing is taken for what it was before."""

import jax
import jax.numpy as jnp
import pytest

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.interception._trace import find_layers

PARAMS = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4))}
X = jnp.ones((5, 4))


def test_a_mutable_array_that_is_read_again_is_another_input():
    def model(p, x):
        state = jax.new_ref(x)
        state[...] = jnp.tanh(state[...] @ p["w"])
        return state[...] @ p["v"]

    assert find_layers(model, PARAMS, X)["v"].shares_input_with is None


@pytest.mark.parametrize("jit", [False, True])
def test_a_parameter_written_into_a_mutable_array_is_reported(jit):
    def model(p, x):
        state = jax.new_ref(jnp.zeros((4, 4)))

        def write(state):
            state[...] = 2 * p["w"]

        (jax.jit(write) if jit else write)(state)
        return x @ state[...] @ p["v"]

    with pytest.raises(UncoveredParameterError, match="w: is read inside `swap`"):
        find_layers(model, PARAMS, X).raise_uncovered()


def test_a_parameter_added_to_a_mutable_array_is_reported():
    def model(p, x):
        state = jax.new_ref(jnp.zeros((4, 4)))
        jax.ref.addupdate(state, ..., p["w"])
        return x @ state[...] @ p["v"]

    with pytest.raises(UncoveredParameterError, match="w: is read inside `addupdate`"):
        find_layers(model, PARAMS, X).raise_uncovered()


def test_a_parameter_that_is_printed_is_a_layer_all_the_same():
    def model(p, x):
        jax.debug.print("{} {}", jnp.linalg.norm(p["w"]), p["w"])
        return x @ p["w"] @ p["v"]

    table = find_layers(model, PARAMS, X)
    assert list(table) == ["w", "v"]
    assert not table.problems
