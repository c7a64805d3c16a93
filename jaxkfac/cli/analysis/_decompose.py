"""Eigenvalues of factors on disk, one group of layers and one block at a time."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.cli.analysis._files import Folder
from jaxkfac.cli.analysis._parts import Group
from jaxkfac.factors import Factors
from jaxkfac.interception import Layer
from jaxkfac.linalg import Spectrum

_TABLES = ("a", "a_without_ones", "g")


class Chosen:
    """The blocks that are decomposed.

    Args:
        groups: All layers.
        pattern: Full match of a layer's name, or of that of one of its blocks.

    Raises:
        UnknownLayerError: it matches none.
    """

    def __init__(self, groups: Sequence[Group], pattern: str) -> None:
        self.groups, compiled = groups, re.compile(pattern)
        self.blocks = [
            (group, block)
            for group in groups
            for block in group.blocks
            if any(compiled.fullmatch(name) for name in group.names(block))
        ]
        if not self.blocks:
            names = [name for group in groups for b in group.blocks for name in group.names(b)]
            raise UnknownLayerError(
                f"--decompose {pattern!r} matches no layer; the nearest names are "
                f"{nearest(pattern, names)}"
            )

    def is_whole(self, group: Group) -> bool:
        """Whether all blocks of a group are decomposed."""
        return len(self.of(group)) == len(group.blocks)

    def of(self, group: Group) -> list[int | None]:
        """The blocks of a group that are decomposed."""
        return [block for own, block in self.blocks if own is group]

    def largest(self) -> int:
        """Size of the largest matrix."""
        sides = [
            size
            for group, _ in self.blocks
            for layer in group.layers
            if not layer.is_diagonal
            for size, dense in (
                (layer.in_features + 1, layer.a_dense),
                (layer.out_features, layer.g_dense),
            )
            if dense
        ]
        return max(sides, default=1)


def decompose(
    chosen: Chosen, folder: Folder, *, dtype: str, advance: Callable[[int, str], None]
) -> None:
    """Write the eigenvalues of every chosen block; those that are there are left.

    Raises:
        NonFiniteFactorError: naming the factor.
    """
    for number, (group, block) in enumerate(chosen.blocks, 1):
        name = group.name(block)
        if not folder.has_values(name):
            folder.save_values(name, _values(group, block, folder, dtype))
        advance(number, name)


def _values(group: Group, block: int | None, folder: Folder, dtype: str) -> dict[str, np.ndarray]:
    layers = group.of_block(block)
    bases = jk.eigendecompose(
        _factors(group, block, layers, folder), vectors=False, placement="host", dtype=dtype
    )
    found = {
        f"{table}|{key}": np.asarray(spectrum.values)
        for table in _TABLES
        for key, spectrum in getattr(bases, table).items()
    }
    return found | {f"diagonals|{k}": np.asarray(x) for k, x in bases.diagonals.items()}


def _factors(group: Group, block: int | None, layers: tuple[Layer, ...], folder: Folder) -> Factors:
    tables: dict[str, Any] = {"a_sums": {}, "g_sums": {}, "diagonals": {}}
    counts: dict[str, np.ndarray] = {}
    terms = 0.0
    suffix = "" if block is None else f"[{block}]"
    for part in group.parts(block):
        stored = folder.load_part(part)
        terms = stored.terms
        tables[part.table][part.key + suffix] = stored.whole(part)
        if part in stored.counts:
            counts[part.key + suffix] = stored.counts[part]
    return Factors(
        a_counts=counts, terms=np.asarray(terms, np.float32), layers=layers, bias="joint", **tables
    )


def eigenbases(chosen: Chosen, folder: Folder, *, max_condition: float) -> jk.Eigenbases:
    """Bases without vectors of what has been decomposed.

    A stacked layer of which all blocks are there is one layer; of others each block is one.
    """
    tables: dict[str, Any] = {table: {} for table in _TABLES}
    diagonals: dict[str, object] = {}
    layers: list[Layer] = []
    for group in chosen.groups:
        if not (blocks := chosen.of(group)):
            continue
        stacked = chosen.is_whole(group) and blocks[0] is not None
        found = [(block, folder.load_values(group.name(block))) for block in blocks]
        if stacked:
            layers += group.layers
        for block, values in found:
            if not stacked:
                layers += group.of_block(block)
            for table, key, array in _entries(values):
                if table == "diagonals":
                    diagonals[key] = jnp.asarray(array)
                elif not stacked:
                    tables[table][key] = Spectrum(jnp.asarray(array), None)
        if stacked:
            for table, key, _ in _entries(found[0][1]):
                base = key.removesuffix(f"[{blocks[0]}]")
                rows = [values[f"{table}|{base}[{block}]"] for block, values in found]
                tables[table][base] = Spectrum(jnp.asarray(np.stack(rows)), None)
    return jk.Eigenbases(
        **tables,
        diagonals=diagonals,
        layers=tuple(layers),
        bias="joint",
        max_condition=max_condition,
        floor=0.0,
    )


def _entries(values: dict[str, np.ndarray]) -> Iterator[tuple[str, str, np.ndarray]]:
    for name, array in values.items():
        table, _, key = name.partition("|")
        yield table, key, array
