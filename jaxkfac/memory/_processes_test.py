import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkfac.memory import whole_here


@pytest.mark.parametrize("spec", [None, PartitionSpec(), PartitionSpec("rows")])
def test_an_array_that_is_read_keeps_no_copy_on_the_host(spec):
    x = jnp.arange(4.0)
    if spec is not None:
        mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
        x = jax.device_put(x, NamedSharding(mesh, spec))
    other = whole_here(x)
    assert np.array_equal(np.asarray(other), np.arange(4))
    if spec != PartitionSpec("rows") or len(jax.devices()) < 2:  # it is put together on the host
        assert other is not x
        assert other.unsafe_buffer_pointer() == x.addressable_data(0).unsafe_buffer_pointer()


def test_an_array_of_numpy_is_read_as_it_is():
    x = np.ones(3)
    assert whole_here(x) is x
