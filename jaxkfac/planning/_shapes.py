"""Trees of shapes: bytes, casts, slices of a batch, and where arrays lie."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxkfac.memory import divided_shardings

# ---------------- trees of shapes: bytes, casts, slices of a batch


class UnavailableError(Exception):
    """An option that this program, batch or optimizer does not have, and why."""


def shapes_of(tree: PyTree) -> PyTree:
    """``jax.ShapeDtypeStruct`` for every array or shape."""
    return jax.tree.map(_shape, tree)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    value = np.asarray(leaf)
    return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))


def nbytes(tree: PyTree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def nelements(tree: PyTree) -> int:
    """Number of elements of all leaves."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nodes_of(tree: PyTree, kind: type | tuple[type, ...]) -> list[Any]:
    """The nodes of a tree that are of a kind."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def in_half(tree: PyTree) -> PyTree:
    """Floating leaves in bfloat16."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        tree,
    )


def num_examples(batch: PyTree) -> int:
    """Length of the leading axis, which all arrays share.

    Raises:
        UnavailableError: they do not.
    """
    lengths = {x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(lengths) != 1 or () in lengths:
        raise UnavailableError("the arrays of the batch do not share their first axis")
    return int(lengths.pop()[0])


def micro_batch(batch: PyTree, steps: int) -> PyTree:
    """One of ``steps`` equal parts of a batch."""
    count = num_examples(batch) // steps
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), batch)


def divisors(count: int) -> list[int]:
    """Divisors above 1, ascending: the numbers of equal micro-batches."""
    return [k for k in range(2, count + 1) if count % k == 0]


# ---------------- where arrays of a fully sharded training lie


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a training lie.

    Attributes:
        mesh: Of the devices that everything but the batch is divided over; ``None`` where each
            device has all of it.
    """

    mesh: AbstractMesh | None = None

    def shardings(self, tree: PyTree) -> PyTree:
        """Where arrays lie, ``None`` without a mesh."""
        if self.mesh is None:
            return None
        return divided_shardings(tree, self.mesh, self.mesh.axis_names)

    def nbytes(self, tree: PyTree) -> int:
        """Bytes on one device."""
        if self.mesh is None:
            return nbytes(tree)
        shardings = jax.tree.leaves(self.shardings(tree))
        sizes = zip(jax.tree.leaves(tree), shardings, strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in sizes)

    def divided(self, tree: PyTree) -> PyTree:
        """Shapes with their shardings."""
        if self.mesh is None:
            return tree
        return jax.tree.map(_shape_at, tree, self.shardings(tree))

    def batch(self, tree: PyTree) -> PyTree:
        """Shapes of the batch of all devices, each of which has such a part of it."""
        if self.mesh is None:
            return tree
        there = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        replicated, size = NamedSharding(self.mesh, PartitionSpec()), self.mesh.size

        def all_parts(x: Any) -> jax.ShapeDtypeStruct:
            if not x.shape:
                return _shape_at(x, replicated)
            whole = jax.ShapeDtypeStruct((size * x.shape[0], *x.shape[1:]), x.dtype)
            return _shape_at(whole, there)

        return jax.tree.map(all_parts, tree)

    def everywhere(self, tree: PyTree) -> PyTree:
        """Shapes of arrays that are whole on each device."""
        if self.mesh is None:
            return tree
        there = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: _shape_at(x, there), tree)


WHOLE = Placement()


def _shape_at(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def placement(mesh: AbstractMesh, devices: int, *, sharded: bool) -> Placement:
    """The placement that a plan was asked for.

    Args:
        mesh: In context, perhaps empty.
        devices: How many there are.
        sharded: Whether parameters are divided over them.

    Raises:
        ValueError: one device, or a mesh that is not one automatic axis of so many.
    """
    if not sharded:
        return WHOLE
    if devices == 1:
        raise ValueError("fully_sharded=True: of 1 device; say devices=, or set a mesh")
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


def on_devices(tree: PyTree, mesh: Mesh) -> PyTree:
    """Shapes that lie on an abstract mesh, on these devices of it."""
    return jax.tree.map(lambda x: _shape_at(x, NamedSharding(mesh, x.sharding.spec)), tree)


def mesh_of(tree: PyTree, *, whole: bool = False) -> AbstractMesh | None:
    """The mesh that all of some shapes lie on, ``None`` without one.

    Args:
        tree: The shapes.
        whole: Whether either all or none have to lie on one.

    Raises:
        ValueError: some do and some do not, or on another.
    """
    found = [getattr(x, "sharding", None) for x in jax.tree.leaves(tree)]
    meshes = {s.mesh.abstract_mesh if isinstance(s, NamedSharding) else None for s in found}
    if whole and len(meshes) > 1:
        raise ValueError(
            "some arguments lie on a mesh and others on none, or on another: give each a "
            "NamedSharding, PartitionSpec() where it is whole on every device"
        )
    return meshes.pop() if len(meshes) == 1 else None


def mesh_here(mesh: AbstractMesh) -> Mesh:
    """The mesh with devices of this process."""
    found = np.asarray(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    return Mesh(found, mesh.axis_names, axis_types=mesh.axis_types)
