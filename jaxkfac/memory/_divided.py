"""Shardings that divide every array among devices, where its shape lets them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

PyTree = Any


def divided_shardings(tree: PyTree, mesh: Mesh | AbstractMesh, axes: str | Sequence[str]) -> PyTree:
    """Where arrays lie that are divided among the devices of one mesh axis, or of several.

    For parameters and an optimizer's state of fully sharded training. An array is divided along
    the last of its axes that the number of devices divides, a stack's among them. Where none is
    divided by the devices of all ``axes``, those of a single one are tried, the most first. What
    cannot be divided so is whole on every device: numbers and vectors, and matrices such as the
    factor of an odd number of inputs and the ones of a bias.

    Args:
        tree: Arrays, or their shapes.
        mesh: The mesh.
        axes: Names of its axes.

    Returns:
        The tree with a ``NamedSharding`` for each array, as ``jax.device_put`` and the
        ``out_shardings=`` of ``jax.jit`` take it. Specs have an entry for each axis of the array.

    Raises:
        KeyError: a name that is no axis of the mesh.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))  # in a program jax.make_mesh
        >>> places = jk.memory.divided_shardings(params, mesh, "data")
        >>> tuple(places["kernel"].spec), tuple(places["bias"].spec)
        ((None, 'data'), (None,))
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    singles = sorted(names, key=lambda name: -mesh.shape[name])
    tried = [names, *((name,) for name in singles if len(names) > 1)]

    def of(x: Any) -> NamedSharding:
        entries: list[Any] = [None] * len(x.shape)
        for group in tried if len(x.shape) > 1 else ():
            count = math.prod(mesh.shape[name] for name in group)
            fitting = [i for i, n in enumerate(x.shape) if count > 1 and n and n % count == 0]
            if fitting:
                entries[fitting[-1]] = group if len(group) > 1 else group[0]
                break
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree.map(of, tree)
