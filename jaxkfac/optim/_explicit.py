"""Arrays sharded over explicit mesh axes: gathered for the arithmetic, sharded again after."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxkfac.curvature.operators import Operator
from jaxkfac.interception import leaves_by_path

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


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredOperator(Operator):
    """An operator whose vectors and products are whole on every device.

    Attributes:
        operator: Of sharded parameters.
        params: These, whose shardings its vectors must have.
    """

    operator: Operator
    params: PyTree

    @property
    def like(self) -> PyTree:
        return self.operator.like

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        return whole(self.operator.product(self._sharded(leaves)))

    def forms(self, vectors: Sequence[dict[str, Array]]) -> Float[Array, "k k"]:
        return whole(self.operator.forms([self._sharded(vector) for vector in vectors]))

    def _sharded(self, leaves: dict[str, Array]) -> dict[str, Array]:
        known = leaves_by_path(self.params)
        return {path: sharded_like(x, known.get(path)) for path, x in leaves.items()}


def on_mesh_of(like: PyTree, tree: PyTree) -> PyTree:
    """``tree`` on the explicit mesh that ``like`` lies on, if it does, as a step returns it.

    What is not sharded is whole on every device. Results of a step have a spec with an entry for
    each axis, and ``jit`` takes ``P()`` and ``P(None, None)`` for two: from zeros like parameters
    that were placed with ``P()``, or that were made off the mesh, it would compile the step twice.
    """
    arrays = [x for x in jax.tree.leaves(like) if isinstance(x, Array)]
    placed = next((x for x in arrays if jax.typeof(x).sharding.mesh.explicit_axes), None)
    if placed is None or isinstance(placed, Tracer):
        return tree
    sharding: Any = placed.sharding

    def put(x: Any) -> Any:
        if not isinstance(x, Array):
            return x
        spec = _spec(x) or ()
        full = PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
        return jax.device_put(x, NamedSharding(sharding.mesh, full))

    return jax.tree.map(put, tree)


def _spec(x: Any) -> PartitionSpec | None:
    if not isinstance(x, Array) or jax.typeof(x).sharding.mesh.empty:
        return None
    return jax.typeof(x).sharding.spec
