"""Trees of shapes: bytes, casts, micro-batches, and shardings."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac.memory import divided_shardings

# ---------------- trees of shapes: bytes, casts, micro-batches


class UnavailableError(Exception):
    """An option does not apply to this program, batch or optimizer; says why."""


def shapes_of(tree: PyTree) -> PyTree:
    """Replace every array or shape by a ``jax.ShapeDtypeStruct``."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    value = np.asarray(leaf)
    return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))


def nbytes(tree: ArrayTree) -> int:
    """Bytes of all leaves together."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def nelements(tree: ArrayTree) -> int:
    """Number of elements of all leaves together."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nodes_of(tree: PyTree, kind: type | tuple[type, ...]) -> list[Any]:
    """The nodes of a tree that are instances of a class."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def in_half(tree: ArrayTree) -> ArrayTree:
    """The tree with floating leaves in bfloat16, except those of fewer bits."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
            if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
            else x
        ),
        tree,
    )


def num_examples(batch: ArrayTree) -> int:
    """Length of the first axis, which all arrays must share.

    Raises:
        UnavailableError: the lengths differ.
    """
    lengths = {x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(lengths) != 1 or () in lengths:
        raise UnavailableError("the arrays of the batch do not share their first axis")
    return int(lengths.pop()[0])


def micro_batch(batch: ArrayTree, steps: int) -> ArrayTree:
    """The shapes of one of ``steps`` equal micro-batches."""
    count = num_examples(batch) // steps
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), batch)


def divisors(count: int) -> list[int]:
    """Divisors above 1, ascending: the possible numbers of equal micro-batches."""
    return [k for k in range(2, count + 1) if count % k == 0]


# ---------------- shardings of a fully sharded training


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of a training's arrays on devices.

    Attributes:
        mesh: Mesh over which everything except the batch is sharded; ``None`` if each device has
            full copies.
    """

    mesh: AbstractMesh | None = None

    def shardings(self, tree: PyTree) -> PyTree:
        """Shardings of arrays; ``None`` without a mesh."""
        if self.mesh is None:
            return None
        return divided_shardings(tree, self.mesh, self.mesh.axis_names)

    def nbytes(self, tree: ArrayTree) -> int:
        """Bytes of the arrays on one device."""
        if self.mesh is None:
            return nbytes(tree)
        shardings = jax.tree.leaves(self.shardings(tree))
        sizes = zip(jax.tree.leaves(tree), shardings, strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in sizes)

    def divided(self, tree: ArrayTree) -> ArrayTree:
        """Shapes with their shardings."""
        if self.mesh is None:
            return tree
        return jax.tree.map(_shape_at, tree, self.shardings(tree))

    def batch(self, tree: ArrayTree) -> ArrayTree:
        """Shapes of the batch of all devices, given the part of one device."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        replicated, size = NamedSharding(self.mesh, PartitionSpec()), self.mesh.size

        def all_parts(x: Any) -> jax.ShapeDtypeStruct:
            if not x.shape:
                return _shape_at(x, replicated)
            full_shape = jax.ShapeDtypeStruct((size * x.shape[0], *x.shape[1:]), x.dtype)
            return _shape_at(full_shape, sharding)

        return jax.tree.map(all_parts, tree)

    def everywhere(self, tree: ArrayTree) -> ArrayTree:
        """Shapes of arrays that are replicated on each device."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: _shape_at(x, sharding), tree)


WHOLE = Placement()


def _shape_at(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def placement(mesh: AbstractMesh, devices: int, *, sharded: bool) -> Placement:
    """The placement that a plan requests.

    Args:
        mesh: The mesh in context; may be empty.
        devices: Number of devices.
        sharded: Whether parameters are sharded over them.

    Raises:
        ValueError: there is one device, or the mesh is not one automatic axis of that size.
    """
    if not sharded:
        return WHOLE
    if devices == 1:
        raise ValueError(
            "fully_sharded=True needs more than 1 device; pass devices=, or set a mesh"
        )
    if mesh.empty:
        return Placement(AbstractMesh((devices,), ("data",), axis_types=(AxisType.Auto,)))
    if len(mesh.axis_names) != 1:
        raise ValueError(
            f"a mesh with the axes {mesh.axis_names}: fully sharded training is planned over one "
            'axis, as of jax.sharding.AbstractMesh((8,), ("data",))'
        )
    if mesh.size != devices:
        raise ValueError(f"devices={devices}: the mesh that is set has {mesh.size}")
    if mesh.explicit_axes:
        raise ValueError(
            "fully_sharded=True: over explicit mesh axes a program says itself what is gathered, "
            "and plain models do not: make the mesh with axis_types=(jax.sharding.AxisType.Auto,)"
        )
    return Placement(mesh)


def on_devices(tree: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Move shapes from an abstract mesh to the devices of a concrete one."""
    return jax.tree.map(lambda x: _shape_at(x, NamedSharding(mesh, x.sharding.spec)), tree)


def mesh_of(tree: PyTree, *, all_or_none: bool = False) -> AbstractMesh | None:
    """The mesh that all shapes share, ``None`` without one.

    Args:
        tree: The shapes.
        all_or_none: Whether a mix of meshes, or of shapes with and without a mesh, is an error.

    Raises:
        ValueError: ``all_or_none`` is set and the shapes are mixed.
    """
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(tree)]
    meshes = {s.mesh.abstract_mesh if isinstance(s, NamedSharding) else None for s in shardings}
    if all_or_none and len(meshes) > 1:
        raise ValueError(
            "some arguments lie on a mesh and others on none, or on another: give each a "
            "NamedSharding, PartitionSpec() where it is whole on every device"
        )
    return meshes.pop() if len(meshes) == 1 else None


def mesh_here(mesh: AbstractMesh) -> Mesh:
    """The mesh with devices of this process."""
    device_grid = np.asarray(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return Mesh(device_grid, mesh.axis_names, axis_types=mesh.axis_types)
