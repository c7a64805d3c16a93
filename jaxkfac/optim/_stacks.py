"""A model in which layers of one shape are one stacked layer, as if they had been scanned."""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkfac._serialization import serializable
from jaxkfac.curvature import Eigenbases
from jaxkfac.factors import Corrections, Factors
from jaxkfac.interception import Layer, ParameterMatrix, leaves_by_path, with_leaves
from jaxkfac.linalg import Spectrum

PyTree = Any

# A stack of gradients is a copy of them, and a product of this size costs far more than a copy.
# Larger layers are few, or the copy of all at once is what a large model cannot afford.
LARGEST_SIDE = 512


class SameShape(NamedTuple):
    """Layers that differ in their names alone.

    Attributes:
        layer: The stacked layer, its leading stacked axis over the members; of one member, that.
        members: The layers, in the order of the program.
        diagonal_axes: How many axes the diagonal of a member has, where it is one.
    """

    layer: Layer
    members: tuple[Layer, ...]
    diagonal_axes: int

    def matrices(self) -> Iterator[tuple[ParameterMatrix, list[ParameterMatrix]]]:
        """The stacked weight and bias, each with those of the members."""
        for part in ("weight", "bias"):
            if (stacked := getattr(self.layer, part)) is not None:
                yield stacked, [getattr(member, part) for member in self.members]


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which layers of a model are stacked. A pytree without arrays.

    An unrolled model costs equations for each layer and whatever is done with it, and XLA compiles
    each of them: 48 equal layers as one stack compile like a scanned model. Layers are stacked
    where they agree in everything but their names, together with all other readers of their
    inputs (queries, keys and values). Slices of a parameter, and parameters that several blocks
    cover, stay by themselves.

    Attributes:
        layers: The layers of the model, static.
        groups: The stacks, and as stacks of one the layers that nothing is like; static.
    """

    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    groups: tuple[SameShape, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, like: Factors) -> "Stacks":
        """The stacks of a model, of whose factors ``like`` has the shapes."""
        axes = {name: len(x.shape) for name, x in like.diagonals.items()}
        alike: dict[Hashable, list[list[Layer]]] = defaultdict(list)
        for readers in _readers(like.layers):
            same = tuple((_anonymous(x), axes.get(x.name, 0)) for x in readers)
            alone = not all(map(_is_plain(like.layers), readers))
            alike[(readers[0].name if alone else ""), same].append(readers)
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
        """Every layer by itself."""
        axes = {name: len(x.shape) for name, x in like.diagonals.items()}
        alone = (SameShape(layer, (layer,), axes.get(layer.name, 0)) for layer in like.layers)
        return cls(like.layers, tuple(alone))

    @functools.cached_property
    def _several(self) -> list[SameShape]:
        return [group for group in self.groups if len(group.members) > 1]

    # -- trees like the parameters ------------------------------------------------------

    def tree(self, tree: PyTree) -> dict[str, Any]:
        """``{path: leaf}``, with the leaves of each stack as one; zeros for those that lack.

        Mixed dtypes of one stack are promoted. A stack of which nothing is there is left out.
        """
        leaves = leaves_by_path(tree)
        for group in self._several:
            for stacked, members in group.matrices():
                parts = [leaves.pop(member.path, None) for member in members]
                dtypes = [x.dtype for x in parts if x is not None]
                if not dtypes:
                    continue
                with jax.numpy_dtype_promotion("standard"):
                    dtype = functools.reduce(jnp.promote_types, dtypes)
                leaves[stacked.path] = jnp.stack(
                    [
                        jnp.zeros(m.atoms, dtype) if x is None else x.reshape(m.atoms).astype(dtype)
                        for m, x in zip(members, parts, strict=True)
                    ]
                )
        return leaves

    def unstacked_tree(self, stacked: dict[str, Any], like: PyTree) -> PyTree:
        """The inverse of :meth:`tree`, in the shapes and dtypes of ``like``."""
        leaves, shapes = dict(stacked), leaves_by_path(like)
        for group in self._several:
            for matrix, members in group.matrices():
                if matrix.path not in leaves:
                    continue
                parts = _unstacked(leaves.pop(matrix.path), len(matrix.atoms))
                for member, part in zip(members, parts, strict=True):
                    if (leaf := shapes.get(member.path)) is not None:
                        leaves[member.path] = part.reshape(leaf.shape).astype(leaf.dtype)
        return with_leaves(like, leaves)

    # -- factors and bases ------------------------------------------------------------------

    def factors(self, factors: Factors) -> Factors:
        """Factors of the stacked model."""
        stacked, more = self._stacked_table, factors.corrections
        if more is not None:
            more = more._replace(sums=stacked(more.sums), bias_sums=stacked(more.bias_sums))
        return dataclasses.replace(
            factors,
            a_sums=stacked(factors.a_sums),
            a_counts=stacked(factors.a_counts),
            g_sums=stacked(factors.g_sums),
            diagonals=stacked(factors.diagonals),
            layers=tuple(group.layer for group in self.groups),
            corrections=more,
        )

    def _stacked_table(self, table: dict[str, Any]) -> dict[str, Any]:
        out = {}
        for layer, members, _ in self.groups:
            if members[0].name in table:
                each = [table[member.name] for member in members]
                out[layer.name] = jnp.stack(each) if len(each) > 1 else each[0]
        return out

    def unstacked_factors(self, stacked: Factors) -> Factors:
        """The inverse of :meth:`factors`."""
        return dataclasses.replace(
            stacked,
            a_sums=self._each(stacked.a_sums, lambda layer: 1 + layer.a_dense),
            a_counts=self._each(stacked.a_counts, lambda layer: 0),
            g_sums=self._each(stacked.g_sums, lambda layer: 1 + layer.g_dense),
            diagonals=self._each_diagonal(stacked.diagonals),
            layers=self.layers,
            corrections=self._unstacked_corrections(stacked.corrections),
        )

    def unstacked_bases(self, stacked: Eigenbases) -> Eigenbases:
        """Bases of the layers of the model, of those of the stacked one."""

        def sides(table: dict[str, Spectrum]) -> dict[str, Spectrum]:
            values = self._each({k: x.values for k, x in table.items()}, lambda layer: 1)
            vectors = {k: x.vectors for k, x in table.items() if x.vectors is not None}
            vectors = self._each(vectors, lambda layer: 2)
            return {k: Spectrum(x, vectors.get(k)) for k, x in values.items()}

        return dataclasses.replace(
            stacked,
            a=sides(stacked.a),
            a_without_ones=sides(stacked.a_without_ones),
            g=sides(stacked.g),
            diagonals=self._each_diagonal(stacked.diagonals),
            layers=self.layers,
            corrections=self._unstacked_corrections(stacked.corrections),
        )

    def _unstacked_corrections(self, more: Corrections | None) -> Corrections | None:
        if more is None:
            return None
        flat = {layer.name for layer, *_ in self.groups if layer.is_diagonal}
        diagonals = {k: x for k, x in more.sums.items() if k in flat}
        blocks = {k: x for k, x in more.sums.items() if k not in flat}
        return more._replace(
            sums=self._each_diagonal(diagonals) | self._each(blocks, lambda layer: 2),
            bias_sums=self._each(more.bias_sums, lambda layer: 1),
        )

    def _each(self, table: dict[str, Any], axes: Callable[[Layer], int]) -> dict[str, Any]:
        """``{layer: array}``; ``axes`` says how many axes come after those of a stack."""
        out = {}
        for layer, members, _ in self.groups:
            if layer.name in table:
                parts = [table[layer.name]]
                if len(members) > 1:
                    parts = _unstacked(parts[0], len(layer.stack) + axes(layer))
                out |= zip((member.name for member in members), parts, strict=True)
        return out

    def _each_diagonal(self, table: dict[str, Any]) -> dict[str, Any]:
        axes = {group.layer.name: group.diagonal_axes for group in self.groups}
        return self._each(table, lambda layer: 1 + axes[layer.name] - len(layer.stack))


def _readers(layers: tuple[Layer, ...]) -> list[list[Layer]]:
    """The layers of each input, in the order of the program."""
    readers: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        readers[layer.input].append(layer)
    return list(readers.values())


def _is_plain(layers: tuple[Layer, ...]) -> Callable[[Layer], bool]:
    """Whether a layer is small, and all of its parameters and alone in covering them."""
    matrices = [m for layer in layers for m in (layer.weight, layer.bias) if m is not None]
    blocks = Counter(matrix.path for matrix in matrices)

    def is_plain(layer: Layer) -> bool:
        own = [m for m in (layer.weight, layer.bias) if m is not None]
        small = layer.is_diagonal or max(layer.in_features, layer.out_features) <= LARGEST_SIDE
        return small and all(not m.index and blocks[m.path] == 1 for m in own)

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

    def stacked(part: str) -> ParameterMatrix | None:
        matrices = [getattr(member, part) for member in members]
        if matrices[0] is None:
            return None
        own = matrices[0]
        return ParameterMatrix(
            path=_joined(matrices, "path"),
            index=(),
            atoms=(len(members), *own.atoms),
            stack=(0, *(p + 1 for p in own.stack)),
            inputs=tuple(p + 1 for p in own.inputs),
            outputs=tuple(p + 1 for p in own.outputs),
        )

    weight = stacked("weight")
    assert weight is not None
    stack = (len(members), *first.stack)
    return dataclasses.replace(
        first, name=name, input=owner, weight=weight, bias=stacked("bias"), stack=stack
    )


def _joined(members: Any, field: str) -> str:
    """One name for several."""
    first, *more = (getattr(member, field) for member in members)
    return f"{first} and {len(more)} more" if more else first


def _unstacked(x: Any, axes: int) -> list[Any]:
    """The members of a stack. Its axis is counted from the end: ``vmap`` puts others before it."""
    axis = x.ndim - axes
    return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
