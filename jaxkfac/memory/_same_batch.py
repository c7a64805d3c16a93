"""Whether all processes of a run feed the batch that they should."""

import zlib
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxkfac.memory._processes import ProcessGroup


def check_same_batch(batch: PyTree, *, local: bool = False) -> None:
    """Refuse a run whose processes feed different batches. Call it once, with the first batch.

    JAX does not notice: each process goes on with its own rows, and parameters that should be
    equal are not. Every process has to call it. With one process it does nothing.

    Args:
        batch: A tree of arrays. Every process is to hold the same one, as where
            ``jax.device_put(batch, sharding)`` follows.
        local: Whether each process holds rows of its own instead, as for
            ``jax.make_array_from_process_local_data``: then structure, shapes and dtypes are
            compared, and values are not.

    Raises:
        ProcessesDisagreeError: structure, shapes or dtypes differ, or a digest of the values
            does; or another process has failed meanwhile.
        ValueError: an array lies on several processes already, so its values cannot be read here.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> jk.check_same_batch((jnp.ones((8, 3)), jnp.zeros(8, int)))
    """
    group = ProcessGroup.everywhere()
    if group is None:
        return
    leaves, tree = jax.tree.flatten(batch)
    error = None
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in leaves):
        error = ValueError(
            "check_same_batch: the batch lies on several processes already; give the arrays that "
            "this process has read"
        )
    arrays: list[Any] = [] if error else [np.asarray(x) for x in leaves]
    forms = [(x.shape, x.dtype.name) for x in arrays]
    group.agree("the first batch, its structure, shapes and dtypes", f"{tree} {forms}", error)
    if not local:
        digests = [zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) for x in arrays]
        group.agree("the first batch, its values", repr(digests))
