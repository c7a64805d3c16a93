"""What is gathered, stored and decomposed by itself: arrays of factors, and groups of layers."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxkfac.interception import Layer, ParameterMatrix

TABLES = ("a_sums", "g_sums", "diagonals")  # of Factors


class Part(NamedTuple):
    """An array of :class:`~jaxkfac.Factors`, or one block of a stacked one.

    Attributes:
        table: Attribute of ``Factors``.
        key: Key in it.
        block: Index along the leading stacked axis, ``None`` where there is none.
    """

    table: str
    key: str
    block: int | None

    def __str__(self) -> str:
        side = {"a_sums": "A", "g_sums": "G", "diagonals": "the diagonal"}[self.table]
        return f"{side} of {self.key}" + ("" if self.block is None else f"[{self.block}]")


class Group(NamedTuple):
    """Layers that are decomposed together: they share an input, or are one parameter.

    Attributes:
        layers: As they are in the model.
        blocks: Indices of the leading stacked axis; ``(None,)`` without one.
    """

    layers: tuple[Layer, ...]
    blocks: tuple[int | None, ...]

    def name(self, block: int | None) -> str:
        """What it is called in ``--decompose``."""
        return self.layers[0].name + ("" if block is None else f"[{block}]")

    def names(self, block: int | None) -> list[str]:
        """By which ``--decompose`` may ask for a block."""
        own = [layer.name for layer in self.layers]
        return own + ([] if block is None else [f"{name}[{block}]" for name in own])

    def parts(self, block: int | None) -> Iterator[Part]:
        """The arrays of a block, each once."""
        found: dict[Part, None] = {}
        for layer in self.layers:
            if layer.is_diagonal:
                found[Part("diagonals", layer.name, None)] = None
                continue
            found[Part("a_sums", layer.input, block)] = None
            found[Part("g_sums", layer.name, block)] = None
        yield from found

    def of_block(self, block: int | None) -> tuple[Layer, ...]:
        """The layers as they are in one block, with its number in their names."""
        if block is None:
            return self.layers
        return tuple(_one_block(layer, block) for layer in self.layers)


def groups_of(layers: Sequence[Layer]) -> list[Group]:
    """Every layer in one group, in the order of the layers."""
    parents = {layer.name: layer.name for layer in layers}

    def root(name: str) -> str:
        while parents[name] != name:
            name = parents[name]
        return name

    weights: dict[str, str] = {}
    for layer in layers:
        parents[root(layer.name)] = root(layer.input)
        first = weights.setdefault(f"{layer.weight.path}{layer.weight.index}", layer.name)
        parents[root(layer.name)] = root(first)
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(root(layer.name), []).append(layer)
    return [Group(tuple(own), _blocks(own)) for own in found.values()]


def _blocks(layers: Sequence[Layer]) -> tuple[int | None, ...]:
    stacks = {layer.stack for layer in layers}
    if len(stacks) == 1 and (stack := stacks.pop()) and not any(x.is_diagonal for x in layers):
        return tuple(range(stack[0]))
    return (None,)


def _one_block(layer: Layer, block: int) -> Layer:
    return dataclasses.replace(
        layer,
        name=f"{layer.name}[{block}]",
        input=f"{layer.input}[{block}]",
        stack=layer.stack[1:],
        weight=_matrix(layer.weight, block),
        bias=None if layer.bias is None else _matrix(layer.bias, block),
    )


def _matrix(matrix: ParameterMatrix, block: int) -> ParameterMatrix:
    """The slice of a parameter at an index of its first stacked axis."""
    (axis, *stack), atoms = matrix.stack, list(matrix.atoms)
    del atoms[axis]

    def moved(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(p - (p > axis) for p in positions)

    rest: Any = {name: moved(getattr(matrix, name)) for name in ("inputs", "outputs")}
    return dataclasses.replace(
        matrix, index=(*matrix.index, block), atoms=tuple(atoms), stack=moved(stack), **rest
    )
