"""Write a gradient store batch by batch, and measure the eigenvalues on the way."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxkfac.curvature import (
    BlockDamping,
    Eigenbases,
    RotatedPart,
    owned_blocks,
    rotated_block,
    rotated_parts,
    rotated_powers,
    rotated_squares,
)
from jaxkfac.factors import Batch, Corrections, Origin
from jaxkfac.interception import Layer
from jaxkfac.kinds import LowRankMatrices, rotate_gradients
from jaxkfac.memory import bytes_text
from jaxkfac.uses._example_gradients import Queries, block_dtype
from jaxkfac.uses._examples import Examples, batches_of
from jaxkfac.uses._queries import fitting, in_examples
from jaxkfac.uses._store_files import StoreFolder, StoreInMemory, chunks, digest_of

# ---------------- products with rows of a store


_EXACT = jax.lax.Precision.HIGHEST

Parts = tuple[RotatedPart, ...]


def width(parts: Parts) -> int:
    """Number of elements in a row."""
    return sum(p.size for p in parts)


def as_rows(blocks: Sequence[Float[Array, "..."]], parts: Parts) -> Float[Array, "many width"]:
    """Join arrays ``(stack..., many, rows, columns)`` into rows, each flattened in its order."""
    moved = [_first(x, len(p.layer.stack)) for x, p in zip(blocks, parts, strict=True)]
    return jnp.concatenate([x.reshape(len(x), -1) for x in moved], 1)


def _first(block: Array, axis: int) -> Array:
    return jnp.moveaxis(block, axis, 0)


def _columns(parts: Parts) -> list[slice]:
    ends = itertools.accumulate((p.size for p in parts), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@jax.jit
def rotated_queries(queries: Queries, bases: Eigenbases) -> list[Any]:
    """Queries in the eigenbasis, by part: ``(Q, size)``, or two factors for low rank."""
    by_part: list[Any] = []
    for block in owned_blocks(bases):
        layer, axis = block.layer, len(block.layer.stack)
        weight, bias = rotated_block(queries.whole, bases, block)
        if layer.name in queries.low_rank and layer.weight in block.parameters:
            by_part.append(_rotated_factors(queries, bases, layer))
            weight = None
        for x in (weight, bias):
            if x is not None:
                by_part.append(_first(x, axis).reshape(queries.number, -1))
    return by_part


def _rotated_factors(queries: Queries, bases: Eigenbases, layer: Layer) -> LowRankMatrices:
    """``(stack..., Q, in[+1], rank[+1])`` and ``(stack..., Q, rank[+1], out)``.

    A joint bias is not part of the weight's factors, so it adds one to the rank.
    """
    factors: Any = queries.of_weight(layer)
    a, g = bases.spectra(layer)
    left_factor, right_factor = (x.astype(g.values.dtype) for x in factors)
    if bases.wants_ones(layer):
        bias = queries.of_bias(layer)[..., None, :].astype(right_factor.dtype)
        left_factor = jnp.pad(left_factor, [(0, 0)] * (left_factor.ndim - 2) + [(0, 1), (0, 1)])
        left_factor = left_factor.at[..., -1, -1].set(1)
        right_factor = jnp.concatenate([right_factor, bias], -2)
    return LowRankMatrices(
        rotate_gradients(left_factor, a.vectors, None),
        rotate_gradients(right_factor, None, g.vectors),
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def products(
    rows: Float[Array, "n width"], queries: list[Any], parts: Parts, names: tuple[str, ...]
) -> Float[Array, "Q layers n"]:
    """Products of queries and rows, by layer."""
    by_layer: dict[str, Array] = {}
    for columns, row_part, query in zip(_columns(parts), parts, queries, strict=True):
        if (name := row_part.layer.name) not in names:
            continue
        if isinstance(query, LowRankMatrices):
            dense = jnp.einsum("...ir,...ro->...io", query.left, query.right, precision=_EXACT)
            query = _first(dense, len(row_part.layer.stack)).reshape(-1, row_part.size)
        some = rows[:, columns].astype(query.dtype)
        scores = jnp.einsum("qs,ns->qn", query, some, precision=_EXACT)
        by_layer[name] = by_layer[name] + scores if name in by_layer else scores
    dtype = jnp.result_type(*[x.dtype for x in by_layer.values()])
    return jnp.stack([by_layer[name].astype(dtype) for name in names], 1)


@jax.jit
def weights_of(bases: Eigenbases, damping: Any) -> list[tuple[Array, Array]]:
    """For each part, the inverse eigenvalues and the roots of their unit, each ``(size,)``."""
    return _weights(bases, damping)


@jax.jit
def heuristic_weights_of(bases: Eigenbases) -> list[tuple[Array, Array]]:
    """Like :func:`weights_of`, with the heuristic damping."""
    return _weights(bases, "heuristic")


def _weights(bases: Eigenbases, damping: BlockDamping) -> list[tuple[Array, Array]]:
    by_part = []
    for row_part, power in zip(rotated_parts(bases), rotated_powers(bases, damping), strict=True):
        root = jnp.broadcast_to(power.root, power.values.shape)
        by_part.append((power.values.reshape(row_part.size), root.reshape(row_part.size)))
    return by_part


@functools.partial(jax.jit, static_argnums=(2, 3))
def own_products(
    rows: Float[Array, "n width"],
    weights: list[tuple[Array, Array]],
    parts: Parts,
    names: tuple[str, ...],
) -> Float[Array, " n"]:
    """Products of each row with itself, through the inverse eigenvalues."""
    by_part = []
    for columns, row_part, (values, root) in zip(_columns(parts), parts, weights, strict=True):
        if row_part.layer.name in names:
            some = rows[:, columns].astype(values.dtype) * root
            by_part.append((jnp.square(some) * values).sum(1))
    dtype = jnp.result_type(*[x.dtype for x in by_part])
    return jnp.stack([x.astype(dtype) for x in by_part]).sum(0)


def rows_at_once(parts: Parts, max_bytes: int) -> int:
    """How many rows fit after they are widened to float32."""
    return max(1, max_bytes // (4 * width(parts)))


# ---------------- the writer


_GRADIENTS = 4  # alive for each example: the gradient, its copy by layer, the rotated one, its row


class StoreWriter:
    """Writes the batches of a store, and compares stored ones with the data."""

    def __init__(
        self,
        source: Examples,
        params: PyTree,
        state: PyTree,
        row_parts: tuple[RotatedPart, ...],
        dtype: np.dtype,
        files: StoreFolder | StoreInMemory,
        max_bytes: int,
    ) -> None:
        self._source, self._params, self._state = source, params, state
        self._row_parts, self._dtype, self._files = row_parts, dtype, files
        self._max_bytes = max_bytes
        self._row_bytes = width(row_parts) * dtype.itemsize

        self._rows = source.compiled(_rotated_rows, row_parts, dtype.name)

    def plan(self, number: int | None) -> None:
        """Print the bytes; refuse a store that does not fit on the disk, if the number is given.

        Raises:
            OSError: the disk has less free space.
        """
        if self._files.is_whole:
            return
        done = sum(batch.number for batch in self._files.parts)
        where, per_example = (
            "memory",
            f"{bytes_text(self._row_bytes)} an example in {self._dtype.name}",
        )
        if isinstance(self._files, StoreFolder):
            where = str(self._files.path)
        in_total = (
            ""
            if number is None
            else f", {bytes_text(number * self._row_bytes)} for {number} examples"
        )
        print(f"jaxkfac: gradient store in {where}: {per_example}{in_total}", file=sys.stderr)
        if number is None or not isinstance(self._files, StoreFolder):
            return
        needed, free = (number - done) * self._row_bytes, self._files.free_bytes()
        if needed > free:
            raise OSError(
                f"the gradient store needs {bytes_text(needed)} more, and the disk of "
                f"{self._files.path} has {bytes_text(free)} free: choose another path=, fewer "
                'layers=, or dtype="bfloat16"'
            )

    def run(self, train: Any) -> None:
        """Read all data, and write the batches that are not stored yet.

        Raises:
            ValueError: the data belongs to another store, or has fewer or more batches.
        """
        stored, sums = list(self._files.parts), None
        if stored and not self._files.is_whole:
            sums = self._files.sums()
        index = -1
        for index, some in enumerate(batches_of(train)):
            data = digest_of(some)
            if index < len(stored):
                if stored[index].data != data:
                    raise ValueError(
                        f"train: batch {index} is not the one that the store at "
                        f"{getattr(self._files, 'path', None)} has there: give the data that it "
                        "was made of, in the same batches, or choose another path="
                    )
                continue
            if self._files.is_whole:
                raise ValueError(
                    f"train has more than the {len(stored)} batches that the store holds: choose "
                    "another path="
                )
            rows, new, exists = self._of(some)
            sums = (
                new
                if sums is None
                else {name: np.asarray(sums[name] + x) for name, x in new.items()}
            )
            self._files.append(rows, data, exists, sums)
        if index + 1 < len(stored):
            raise ValueError(f"train has {index + 1} batches, and the store holds {len(stored)}")
        if not self._files.is_whole:
            self._files.finish()

    def _of(self, some: Any) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """Rows of one batch, sums of squares, and which examples exist."""
        source = self._source
        batch = source.checked(self._params, some, self._state)
        size = max(block_dtype(source.bases, layer).itemsize for layer in source.layers)
        at_once = fitting(
            batch,
            example_bytes=_GRADIENTS * width(self._row_parts) * size,
            max_bytes=self._max_bytes,
            name="train",
            remedy="choose fewer layers=",
        )
        cuts: list[Any] = [slice(None)]
        if in_examples(batch) and at_once < batch.num_examples:
            cuts = chunks(batch.num_examples, at_once)
        rows, sums = [], {}
        for cut in cuts:
            chunk = jax.tree.map(lambda x, cut=cut: x[cut], batch) if len(cuts) > 1 else batch
            chunk_rows, squares, terms = self._rows(self._params, source.bases, chunk, self._state)
            rows.append(np.asarray(chunk_rows))
            new = {f"{i:06d}": x for i, x in enumerate(squares)} | {"terms": terms}
            for name, x in new.items():
                sums[name] = np.asarray(sums.get(name, 0) + np.asarray(x, np.float64))
        return np.concatenate(rows), sums, np.asarray(source.exists(batch))


def _rotated_rows(
    source: Examples,
    params: PyTree,
    batch: Batch,
    state: PyTree,
    row_parts: tuple[RotatedPart, ...],
    dtype: str,
) -> tuple[Array, list[Array], Array]:
    """Rows of the examples, sums of their squares by part, and the number of loss terms."""
    blocks, terms = source.rotated_gradients(params, batch, state)
    return as_rows(blocks, row_parts).astype(dtype), rotated_squares(blocks, source.bases), terms


def measured(
    bases: Eigenbases, row_parts: tuple[RotatedPart, ...], stored: Mapping[str, np.ndarray]
) -> Eigenbases:
    """The bases with the eigenvalues of the stored sums."""
    terms = stored["terms"]
    sums, bias_sums = {}, {}
    for layer in bases.layers:  # blocks that own no parameter are not measured
        if not layer.is_diagonal:
            a, g = bases.spectra(layer)
            root = bases.block_root(layer)
            unit = (a.values[..., :, None] / root) * (g.values[..., None, :] / root)
            sums[layer.name] = unit * terms.astype(unit.dtype)
            if layer.bias is not None and not bases.wants_ones(layer):
                bias_sums[layer.name] = g.values * terms.astype(g.values.dtype)
        else:
            diagonal = bases.diagonals[layer.name]
            sums[layer.name] = diagonal * terms.astype(diagonal.dtype)
    for index, row_part in enumerate(row_parts):
        layer, squares = row_part.layer, stored[f"{index:06d}"]
        dtype = block_dtype(bases, layer)
        new = jnp.asarray(squares.astype(dtype))
        if row_part.is_bias:
            bias_sums[layer.name] = new[..., 0, :]
        elif layer.is_diagonal:
            full_parameter = dataclasses.replace(layer.weight, index=())
            matrix = (
                full_parameter if sums[layer.name].size == full_parameter.size else layer.weight
            )
            shape = matrix.read(sums[layer.name]).shape
            sums[layer.name] = matrix.write(sums[layer.name], new.reshape(shape))
        else:
            sums[layer.name] = new
    corrections = Corrections(sums, bias_sums, jnp.asarray(terms, jnp.result_type(float)))
    origin = bases.origin
    if origin is not None:
        origin = Origin("empirical", origin.likelihoods, origin.examples)
    return dataclasses.replace(bases, corrections=corrections, origin=origin)


def known_number(train: Any) -> int | None:
    """Number of examples, if it is known without reading them."""
    if isinstance(train, tuple):
        return len(jax.tree.leaves(train[1])[0]) if len(train) > 1 else None
    if isinstance(train, list) and all(isinstance(x, tuple) and len(x) > 1 for x in train):
        return sum(len(jax.tree.leaves(x[1])[0]) for x in train)
    return None
