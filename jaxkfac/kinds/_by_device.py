"""Examples that a mesh axis divides, apart: each device's own, so that nothing is summed yet."""

import jax
from jax.sharding import AxisType, PartitionSpec

from jaxkfac.kinds._rows import ArrayOrShape


def axis_of_devices(examples: int) -> str | None:
    """The mesh axis over which so many examples are divided, if a trace can tell.

    That is the only axis of the mesh in context with several devices, where the compiler
    partitions along it. Of several axes no trace knows which one the batch has.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    several = [(name, size, kind) for name, size, kind in axes if size > 1]
    match several:
        case [(name, size, AxisType.Auto)] if examples % size == 0:
            return name
    return None


def by_device(x: ArrayOrShape | None, examples: int, axis: str) -> ArrayOrShape | None:
    """The axis ``examples`` of an array cut into one part for each device, those first."""
    if x is None:
        return None
    size = jax.sharding.get_abstract_mesh().shape[axis]
    before, after = x.shape[:examples], x.shape[examples + 1 :]
    parts = x.reshape(*before, size, x.shape[examples] // size, *after)
    parts = parts.transpose(examples, *(d for d in range(parts.ndim) if d != examples))
    # Of a batch that is whole everywhere, each device would else have the sums of all parts.
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (parts.ndim - 1))
    return jax.lax.with_sharding_constraint(parts, spec)
