"""What ``mark_outputs`` takes; where the type hook of the tests would speak first, its parts."""

import jax.numpy as jnp
import pytest

from jaxkfac.interception._mark_outputs import checked_outputs, checked_weight


def test_a_weight_that_is_no_number_is_named():
    for weight in (None, "1", [1.0]):
        with pytest.raises(TypeError, match="mark_outputs: weight=.*, expected a positive number"):
            checked_weight(weight)
    assert checked_weight(2) == 2.0


def test_outputs_that_are_no_array_are_named():
    with pytest.raises(TypeError, match="mark_outputs: x: expected an array, got dict"):
        checked_outputs({"z": jnp.ones(2)})
    with pytest.raises(ValueError, match="x has dtype int32, expected outputs that are floating"):
        checked_outputs(jnp.ones(2, jnp.int32))
