"""Mapped axes: the devices of ``jax.pmap`` and ``jax.shard_map``, and sums over them.

Under ``jax.shard_map`` with ``check_vma=True`` JAX *tracks* an axis: the type of a value says
whether devices may hold different ones, and the gradient of a value that is equal on all devices
arrives summed over them. Under ``jax.pmap``, ``jax.vmap`` and ``check_vma=False`` it tracks
nothing, and every device has its own gradient.
"""

import math
from typing import Any

import jax

from jaxkfac._arguments import ArrayTree, is_differentiable
from jaxkfac._jaxpr_compat import varying_axes

AxisName = str | tuple[str, ...] | None

_UNNAMED = "_internal_pmap_axis_name"  # what jax.pmap calls its axis if axis_name= is left out


def axis_names(axis_name: AxisName) -> tuple[str, ...] | None:
    """The axes that ``axis_name=`` names, as a tuple; ``None`` stays.

    Raises:
        TypeError: it is neither a name nor a tuple of names.
        ValueError: a name occurs twice.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if names is None:
        return None
    if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
        raise TypeError(
            f"axis_name={axis_name!r}: expected the name of a mapped axis, a tuple of names, () if "
            "you reduce by hand, or None"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r}: expected each name once")
    return tuple(names)


def check_mapped(what: str, names: tuple[str, ...]) -> None:
    """Refuse names that no map around the call has.

    Raises:
        ValueError: naming the axis, and the axes that there are.
    """
    absent = next((name for name in names if not is_mapped(name)), None)
    if absent is None:
        return
    others = [x for x in jax.sharding.get_abstract_mesh().manual_axes if x != _UNNAMED]
    there = f"the axes here are {', '.join(map(repr, others))}" if others else "none is here"
    raise ValueError(
        f"{what}: axis_name={absent!r} is no axis of a jax.pmap or jax.shard_map around this call "
        f"({there}): call it inside the mapped function, or leave axis_name= out"
    )


def is_mapped(name: str) -> bool:
    """Whether a map around this call has an axis of this name."""
    try:
        jax.lax.axis_index(name)
    except NameError:
        return False
    return True


def is_tracked(name: str) -> bool:
    """Whether types say which values differ between the devices of an axis."""
    return name in varying_axes(jax.lax.axis_index(name))


def untracked_axes() -> tuple[str, ...]:
    """The axes around this call whose devices may hold different values without showing it.

    ``jax.vmap(axis_name=)`` does not show here.
    """
    return tuple(x for x in jax.sharding.get_abstract_mesh().manual_axes if not is_tracked(x))


def described(name: str) -> str:
    """An axis in words, for messages."""
    return "the unnamed axis of jax.pmap" if name == _UNNAMED else f"the mapped axis {name!r}"


def num_devices(names: tuple[str, ...]) -> int:
    """How many devices there are along some axes."""
    return math.prod(map(jax.lax.axis_size, names))


def axes_apart(names: tuple[str, ...], *trees: ArrayTree) -> tuple[str, ...]:
    """Those of the axes over which devices may hold different values of some trees."""
    if not names:
        return ()
    varying = frozenset().union(*map(varying_axes, jax.tree.leaves(trees)))
    return tuple(x for x in names if x in varying or not is_tracked(x))


def sum_over_devices(tree: Any, names: tuple[str, ...]) -> Any:
    """Sum every leaf over the devices of some axes, once.

    A value that JAX tracks and knows to be equal on all devices is such a sum already.
    """
    if not names:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, leaf in enumerate(leaves):
        groups.setdefault(axes_apart(names, leaf), []).append(position)
    for axes, positions in groups.items():
        if axes:
            sums = jax.lax.psum([leaves[i] for i in positions], axes)
            for position, total in zip(positions, sums, strict=True):
                leaves[position] = total
    return jax.tree.unflatten(structure, leaves)


def sum_of_varying(tree: Any) -> Any:
    """Sum every leaf over all axes over which its type says that devices differ."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))
    return sum_over_devices(tree, tuple(sorted(axes)))


def mean_over_devices(tree: Any, names: tuple[str, ...]) -> Any:
    """The mean of every inexact leaf over the devices of some axes; other leaves stay."""

    def mean(x: Any) -> Any:
        axes = axes_apart(names, x) if is_differentiable(x) else ()
        return jax.lax.pmean(x, axes) if axes else x

    return jax.tree.map(mean, tree) if names else tree
