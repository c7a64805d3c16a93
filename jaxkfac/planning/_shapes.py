"""Trees of shapes: bytes, casts, slices of a batch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


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
