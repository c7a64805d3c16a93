"""Any linear function as an operator."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from jaxkfac.curvature.operators._flat import as_tree
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.interception import leaves_by_path

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionOperator(Operator):
    """A function that the caller says is linear and symmetric."""

    data: Any
    function: Callable[[Any, PyTree], PyTree] = dataclasses.field(metadata={"static": True})
    structs: Any = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> PyTree:
        structure, leaves = self.structs
        return jax.tree.unflatten(structure, leaves)

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        vector = as_tree(self.like, {path: leaves[path] for path in self.leaves})
        out = leaves_by_path(self.function(self.data, vector))
        return {path: out[path] for path in leaves}


def from_function(
    function: Callable[[Any, PyTree], PyTree], data: PyTree, like: PyTree
) -> FunctionOperator:
    """Make an operator of your own linear function.

    Args:
        function: ``function(data, vector) -> product``, linear and symmetric in ``vector``,
            with a product shaped like it. Symmetry is checked where it is needed, by
            :func:`jaxkfac.spectrum`.
        data: Arrays the function needs. As an argument they are not compiled in as constants.
        like: A tree of arrays, or of their shapes, that vectors are shaped like.

    Returns:
        An operator.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 4.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(3))
        >>> print(operator @ jnp.ones(3))
        [1. 2. 3.]
    """
    leaves, structure = jax.tree.flatten(like)
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return FunctionOperator(data, function, (structure, structs))
