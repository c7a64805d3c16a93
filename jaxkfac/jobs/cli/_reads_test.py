"""The counter of readings, which tests of the loops trust, sees them all."""

import jax
import jax.numpy as jnp
import numpy as np


def test_every_way_to_read_is_counted(reads):
    x = jnp.arange(3.0)
    ways = [
        lambda: float(x[0]), lambda: int(x[0]), lambda: bool(x[0]), lambda: x[0].item(),
        lambda: x.tolist(), lambda: np.asarray(x), lambda: np.array(x),
        lambda: jax.device_get([x, x + 1]),
    ]  # fmt: skip
    for i, way in enumerate(ways, 1):
        way()
        assert len(reads) == i
    jax.block_until_ready(jnp.asarray(np.ones(3)) + x[1])
    assert len(reads) == len(ways)
