import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkfac.curvature._placement import put_result, result_sharding
from jaxkfac.memory import aligned_empty

RESULT = np.arange(6, dtype=np.float32).reshape(2, 3)


def factor(how):
    """A factor that is uncommitted, on the second device, or sharded over two."""
    x = jnp.ones((4, 4))
    if how == "uncommitted":
        return x
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    if how == "committed":
        return jax.device_put(x, SingleDeviceSharding(jax.devices()[1]))
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))


@pytest.mark.parametrize("how", ["uncommitted", "committed", "sharded"])
def test_results_go_back_to_where_the_factor_lives(how):
    x = factor(how)
    found = put_result(RESULT, result_sharding(x))
    assert found.committed == x.committed and found.devices() == x.devices()
    assert found.is_fully_replicated and np.array_equal(found, RESULT)


@pytest.mark.parametrize("committed", [False, True])
def test_a_result_has_memory_of_its_own(committed):
    """XLA on the CPU would take the aligned array as it is."""
    result, x = aligned_empty((2, 3), np.dtype(np.float32)), jnp.ones((4, 4))
    result[...] = RESULT
    where = result_sharding(jax.device_put(x, jax.devices()[0]) if committed else x)
    found = put_result(result, where)
    result[...] = np.nan
    assert found.committed == committed and np.array_equal(found, RESULT)


def test_results_of_host_arrays_are_uncommitted():
    assert not put_result(RESULT, result_sharding(RESULT)).committed
