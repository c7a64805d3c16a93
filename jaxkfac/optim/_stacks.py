"""A model whose layers of equal shape form one stacked layer, as if they had been scanned."""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac.blocks import Factors, Place, Side, Sides
from jaxkfac.curvature import Eigenbases
from jaxkfac.flax import serializable
from jaxkfac.interception import Layer, ParameterMatrix

# Stacking copies the gradients; a product of this size costs far more than the copy. Layers above
# it are few, or so large that a big model cannot afford to copy all of them at once.
LARGEST_SIDE = 512


Matrix = TypeVar("Matrix", Factors, Eigenbases)


class SameShape(NamedTuple):
    """Layers that differ only in their names.

    Attributes:
        layer: The stacked layer; its leading stacked axis runs over the members. With one member,
            that member.
        members: The layers, in the order of the program.
        diagonal_axes: Number of axes of a member's diagonal, if it is one.
    """

    layer: Layer
    members: tuple[Layer, ...]
    diagonal_axes: int

    def join(self, table: str, sides: Sequence[Side]) -> Side:
        """The side of the stacked layer, from those of the members."""
        first, *others = sides
        if not others:
            return first
        data = jnp.stack([side.data for side in sides])
        if table != "a":  # other tables have one count for all layers
            return first.with_data(data)
        return Side(data, jnp.stack([side.count for side in sides]), first.is_matrix)

    def split(self, table: str, side: Side) -> list[Side]:
        """The sides of the members, from that of the stacked layer."""
        if len(self.members) == 1:
            return [side]
        side = side if table == "a" else Side(side.data, None, side.is_matrix)
        axes = len(self.layer.stack) + (2 if table == "squares" else 1 + side.is_matrix)
        if table in ("squares", "diagonals") and self.layer.is_diagonal:
            axes = 1 + self.diagonal_axes
        first = jax.tree.leaves(side.data)[0]  # of a spectrum the values
        members = range(len(self.members))
        return [side.map_stack(lambda x, i=i: _member(x, i, first.ndim - axes)) for i in members]

    def matrices(self) -> Iterator[tuple[ParameterMatrix, list[ParameterMatrix]]]:
        """The stacked weight and bias, each with those of the members."""
        for field in ("weight", "bias"):
            if (stacked := getattr(self.layer, field)) is not None:
                yield stacked, [getattr(member, field) for member in self.members]


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which layers of a model are stacked. A pytree without arrays.

    In an unrolled model each layer, and each operation on it, adds equations, and XLA compiles all
    of them; 48 equal layers in one stack compile like a scanned model. Layers are stacked if they
    agree in everything but their names, together with all other readers of their
    inputs (queries, keys and values). Slices of a parameter, and parameters that several blocks
    cover, are not stacked.

    Attributes:
        layers: The layers of the model, static.
        groups: The stacks; a layer with no equal is a stack of one; static.
    """

    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    groups: tuple[SameShape, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, like: Factors) -> "Stacks":
        """The stacks of a model with the factor shapes ``like``."""
        axes = {name: len(x.shape) for name, x in like.diagonals.items()}
        alike: dict[Hashable, list[list[Layer]]] = defaultdict(list)
        for readers in _readers(like.layers):
            signature = tuple((_anonymous(x), axes.get(x.name, 0)) for x in readers)
            alone = not all(map(_is_plain(like.layers), readers))
            alike[(readers[0].name if alone else ""), signature].append(readers)
        groups = []
        for several in alike.values():
            names = [_joined(column, "name") for column in zip(*several, strict=True)]
            for readers, name in zip(zip(*several, strict=True), names, strict=True):
                owner = [x.name for x in several[0]].index(readers[0].input)
                layer = _stacked_layer(readers, name, names[owner])
                groups.append(SameShape(layer, readers, axes.get(readers[0].name, 0)))
        place = {layer.name: i for i, layer in enumerate(like.layers)}
        groups.sort(key=lambda group: place[group.members[0].name])
        return cls(like.layers, tuple(groups))

    @classmethod
    def of_one(cls, like: Factors) -> "Stacks":
        """Every layer as a stack of one."""
        axes = {name: len(x.shape) for name, x in like.diagonals.items()}
        alone = (SameShape(layer, (layer,), axes.get(layer.name, 0)) for layer in like.layers)
        return cls(like.layers, tuple(alone))

    @functools.cached_property
    def _several(self) -> list[SameShape]:
        return [group for group in self.groups if len(group.members) > 1]

    # -- trees like the parameters ------------------------------------------------------

    def tree(self, tree: ArrayTree) -> dict[str, Any]:
        """``{path: leaf}`` with the leaves of each stack joined; a missing leaf counts as zeros.

        Mixed dtypes in one stack are promoted. A stack without any leaf is left out.
        """
        leaves = leaves_by_path(tree)
        for group in self._several:
            for stacked, members in group.matrices():
                member_leaves = [leaves.pop(member.path, None) for member in members]
                dtypes = [x.dtype for x in member_leaves if x is not None]
                if not dtypes:
                    continue
                with jax.numpy_dtype_promotion("standard"):
                    dtype = functools.reduce(jnp.promote_types, dtypes)
                leaves[stacked.path] = jnp.stack(
                    [
                        jnp.zeros(m.atoms, dtype) if x is None else x.reshape(m.atoms).astype(dtype)
                        for m, x in zip(members, member_leaves, strict=True)
                    ]
                )
        return leaves

    def unstacked_tree(self, stacked: dict[str, Any], like: ArrayTree) -> ArrayTree:
        """The inverse of :meth:`tree`, in the shapes and dtypes of ``like``."""
        leaves, shapes = dict(stacked), leaves_by_path(like)
        for group in self._several:
            for matrix, members in group.matrices():
                if matrix.path not in leaves:
                    continue
                stack = leaves.pop(matrix.path)
                for i, member in enumerate(members):
                    if (leaf := shapes.get(member.path)) is not None:
                        x = _member(stack, i, stack.ndim - len(matrix.atoms))
                        leaves[member.path] = x.reshape(leaf.shape).astype(leaf.dtype)
        return with_leaves(like, leaves)

    # -- factors and bases ------------------------------------------------------------------

    def factors(self, factors: Factors) -> Factors:
        """Factors of the stacked model."""
        old, layers = _all_sides(factors), tuple(group.layer for group in self.groups)
        sides: Sides = {}
        for group in self.groups:
            for table in ("a", "g", "diagonals", *_MEASURED):
                if (table, group.members[0].name) in old:
                    members = [old[Place(table, member.name)] for member in group.members]
                    sides[Place(table, group.layer.name)] = group.join(table, members)
        return _with_all_sides(factors, sides, layers)

    def unstacked(self, stacked: Matrix) -> Matrix:
        """Factors or bases of the model's layers, from those of the stacked model."""
        groups, sides = {group.layer.name: group for group in self.groups}, {}
        for (table, name), side in _all_sides(stacked).items():
            members = groups[name].members
            for member, one in zip(members, groups[name].split(table, side), strict=True):
                sides[Place(table, member.name)] = one
        return _with_all_sides(stacked, sides, self.layers)


_MEASURED = "squares", "bias_squares"  # the tables of measured eigenvalues


def _all_sides(matrix: Factors | Eigenbases) -> Sides:
    more = matrix.corrections
    return matrix.sides if more is None else matrix.sides | more.sides


def _with_all_sides(matrix: Matrix, sides: Sides, layers: tuple[Layer, ...]) -> Matrix:
    more = matrix.corrections
    own = {place: side for place, side in sides.items() if place.table not in _MEASURED}
    more = None if more is None else more.with_sides(sides)
    return matrix.with_sides(own, layers=layers, corrections=more)


def _readers(layers: tuple[Layer, ...]) -> list[list[Layer]]:
    """The layers of each input, in the order of the program."""
    readers: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        readers[layer.input].append(layer)
    return list(readers.values())


def _is_plain(layers: tuple[Layer, ...]) -> Callable[[Layer], bool]:
    """Whether a layer is small, covers its parameters completely, and is alone in covering them."""
    matrices = [m for layer in layers for m in (layer.weight, layer.bias) if m is not None]
    blocks = Counter(matrix.path for matrix in matrices)

    def is_plain(layer: Layer) -> bool:
        matrices_of_layer = [m for m in (layer.weight, layer.bias) if m is not None]
        small = layer.is_diagonal or max(layer.in_features, layer.out_features) <= LARGEST_SIDE
        return small and all(not m.index and blocks[m.path] == 1 for m in matrices_of_layer)

    return is_plain


def _anonymous(layer: Layer) -> Hashable:
    """A layer without its names."""
    weight = dataclasses.replace(layer.weight, path="")
    bias = layer.bias and dataclasses.replace(layer.bias, path="")
    owns = layer.input == layer.name
    return owns, dataclasses.replace(layer, name="", input="", weight=weight, bias=bias, uses=0)


def _stacked_layer(members: tuple[Layer, ...], name: str, owner: str) -> Layer:
    first = members[0]
    if len(members) == 1:
        return first

    def stacked(field: str) -> ParameterMatrix | None:
        matrices = [getattr(member, field) for member in members]
        if matrices[0] is None:
            return None
        template = matrices[0]
        return ParameterMatrix(
            path=_joined(matrices, "path"),
            index=(),
            atoms=(len(members), *template.atoms),
            stack=(0, *(p + 1 for p in template.stack)),
            inputs=tuple(p + 1 for p in template.inputs),
            outputs=tuple(p + 1 for p in template.outputs),
        )

    weight = stacked("weight")
    assert weight is not None
    stack = (len(members), *first.stack)
    return dataclasses.replace(
        first, name=name, input=owner, weight=weight, bias=stacked("bias"), stack=stack
    )


def _joined(members: Sequence[Layer] | Sequence[ParameterMatrix], field: str) -> str:
    """One name for several layers."""
    first, *more = (getattr(member, field) for member in members)
    return f"{first} and {len(more)} more" if more else first


def _member(x: Array | np.ndarray, i: int, axis: int) -> Any:
    """One member of a stack. Its axis is counted from the end, as ``vmap`` adds leading axes."""
    return jax.lax.index_in_dim(x, i, axis, keepdims=False)
