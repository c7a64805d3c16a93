"""Which axis of an array is divided, and what stays whole."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxkfac.memory import divided_shardings

MESH = AbstractMesh((4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((8, 16), "data", (None, "data")),
        ((8, 6), "data", ("data", None)),  # the last axis that four devices divide
        ((4, 65, 65), "data", ("data", None, None)),  # a stack
        ((65, 65), "data", (None, None)),
        ((64,), "data", (None,)),
        ((), "data", ()),
        ((0, 3), "data", (None, None)),
        ((8, 16), ("data", "model"), (None, ("data", "model"))),
        ((12, 5), ("data", "model"), ("data", None)),
        ((6, 5), ("data", "model"), ("model", None)),
    ],
)
def test_an_array_is_divided_along_the_last_axis_that_the_devices_divide(shape, axes, spec):
    found = divided_shardings({"x": np.zeros(shape)}, MESH, axes)["x"]
    assert tuple(found.spec) == spec
    shapes = jax.ShapeDtypeStruct(shape, np.float32)
    assert divided_shardings(shapes, MESH, axes) == found


def test_an_axis_of_one_device_divides_nothing():
    alone = AbstractMesh((1,), ("data",))
    assert tuple(divided_shardings(np.zeros((4, 4)), alone, "data").spec) == (None, None)
