"""Arrays sharded over explicit mesh axes: gathered for the arithmetic, sharded again after."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

PyTree = Any


def is_sharded(tree: PyTree) -> bool:
    """Whether the type of any array says that it is sharded; over automatic axes none does."""
    return any(any(spec) for x in jax.tree.leaves(tree) if (spec := _spec(x)) is not None)


def whole(tree: PyTree) -> PyTree:
    """Every array on every device.

    Products of sharded arrays would each have to say how their results are. XLA gathers an array
    where it is used, and frees it after.
    """
    return jax.tree.map(
        lambda x: x if not any(_spec(x) or ()) else jax.sharding.reshard(x, PartitionSpec()), tree
    )


def sharded_like(tree: PyTree, like: PyTree) -> PyTree:
    """The arrays of ``tree`` sharded as those of ``like``."""

    def sharded(x: Any, like: Any) -> Any:
        spec = _spec(like)
        return x if not any(spec or ()) else jax.sharding.reshard(x, spec)

    return jax.tree.map(sharded, tree, like)


def on_mesh_of(like: PyTree, tree: PyTree) -> PyTree:
    """``tree`` whole on every device of the explicit mesh that ``like`` lies on, if it does.

    A step returns its state with the types that it has there: from a state without them it would
    be compiled twice. What is sharded already stays so.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(like) if isinstance(x, Array)]
    mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
    if mesh is None:
        return tree

    def placed(x: Any) -> Any:
        if not isinstance(x, Array) or not jax.typeof(x).sharding.mesh.empty:
            return x
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(placed, tree)


def _spec(x: Any) -> PartitionSpec | None:
    if not isinstance(x, Array) or jax.typeof(x).sharding.mesh.empty:
        return None
    return jax.typeof(x).sharding.spec
