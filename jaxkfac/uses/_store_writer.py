"""Writes a gradient store, batch after batch, and the eigenvalues measured on the way."""

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

# ---------------- products with rows of a gradient store: of queries, and of each row with itself


_EXACT = jax.lax.Precision.HIGHEST

Parts = tuple[RotatedPart, ...]


def width(parts: Parts) -> int:
    """How many numbers a row has."""
    return sum(part.size for part in parts)


def as_rows(blocks: Sequence[Float[Array, "..."]], parts: Parts) -> Float[Array, "many width"]:
    """Parts ``(stack..., many, rows, columns)`` side by side, each in the order of its shape."""
    moved = [_first(x, len(part.layer.stack)) for x, part in zip(blocks, parts, strict=True)]
    return jnp.concatenate([x.reshape(len(x), -1) for x in moved], 1)


def _first(block: Array, axis: int) -> Array:
    return jnp.moveaxis(block, axis, 0)


def _columns(parts: Parts) -> list[slice]:
    ends = itertools.accumulate((part.size for part in parts), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


@jax.jit
def rotated_queries(queries: Queries, bases: Eigenbases) -> list[Any]:
    """Queries in the eigenbasis, by part: ``(Q, size)``, or two factors of a layer at low rank."""
    found: list[Any] = []
    for block in owned_blocks(bases):
        layer, axis = block.layer, len(block.layer.stack)
        weight, bias = rotated_block(queries.whole, bases, block)
        if layer.name in queries.low_rank and layer.weight in block.parameters:
            found.append(_rotated_factors(queries, bases, layer))
            weight = None
        for x in (weight, bias):
            if x is not None:
                found.append(_first(x, axis).reshape(queries.number, -1))
    return found


def _rotated_factors(queries: Queries, bases: Eigenbases, layer: Layer) -> LowRankMatrices:
    """``(stack..., Q, in[+1], rank[+1])`` and ``(stack..., Q, rank[+1], out)``.

    A joint bias, which is no part of the weight's factors, is one more rank.
    """
    factors: Any = queries.of_weight(layer)
    a, g = bases.spectra(layer)
    left, right = (x.astype(g.values.dtype) for x in factors)
    if bases.wants_ones(layer):
        bias = queries.of_bias(layer)[..., None, :].astype(right.dtype)
        left = jnp.pad(left, [(0, 0)] * (left.ndim - 2) + [(0, 1), (0, 1)])
        left = left.at[..., -1, -1].set(1)
        right = jnp.concatenate([right, bias], -2)
    return LowRankMatrices(
        rotate_gradients(left, a.vectors, None), rotate_gradients(right, None, g.vectors)
    )


@functools.partial(jax.jit, static_argnums=(2, 3))
def products(
    rows: Float[Array, "n width"], queries: list[Any], parts: Parts, names: tuple[str, ...]
) -> Float[Array, "Q layers n"]:
    """Products of queries and rows, by layer."""
    by_layer: dict[str, Array] = {}
    for columns, part, query in zip(_columns(parts), parts, queries, strict=True):
        if (name := part.layer.name) not in names:
            continue
        if isinstance(query, LowRankMatrices):
            dense = jnp.einsum("...ir,...ro->...io", query.left, query.right, precision=_EXACT)
            query = _first(dense, len(part.layer.stack)).reshape(-1, part.size)
        some = rows[:, columns].astype(query.dtype)
        each = jnp.einsum("qs,ns->qn", query, some, precision=_EXACT)
        by_layer[name] = by_layer[name] + each if name in by_layer else each
    dtype = jnp.result_type(*[x.dtype for x in by_layer.values()])
    return jnp.stack([by_layer[name].astype(dtype) for name in names], 1)


@jax.jit
def weights_of(bases: Eigenbases, damping: Any) -> list[tuple[Array, Array]]:
    """Of each part the inverse eigenvalues ``(size,)`` and the roots of their unit, likewise."""
    return _weights(bases, damping)


@jax.jit
def heuristic_weights_of(bases: Eigenbases) -> list[tuple[Array, Array]]:
    """The same with the heuristic damping."""
    return _weights(bases, "heuristic")


def _weights(bases: Eigenbases, damping: BlockDamping) -> list[tuple[Array, Array]]:
    found = []
    for part, power in zip(rotated_parts(bases), rotated_powers(bases, damping), strict=True):
        root = jnp.broadcast_to(power.root, power.values.shape)
        found.append((power.values.reshape(part.size), root.reshape(part.size)))
    return found


@functools.partial(jax.jit, static_argnums=(2, 3))
def own_products(
    rows: Float[Array, "n width"],
    weights: list[tuple[Array, Array]],
    parts: Parts,
    names: tuple[str, ...],
) -> Float[Array, " n"]:
    """Products of each row with itself, through the inverse eigenvalues."""
    found = []
    for columns, part, (values, root) in zip(_columns(parts), parts, weights, strict=True):
        if part.layer.name in names:
            some = rows[:, columns].astype(values.dtype) * root
            found.append((jnp.square(some) * values).sum(1))
    dtype = jnp.result_type(*[x.dtype for x in found])
    return jnp.stack([x.astype(dtype) for x in found]).sum(0)


def rows_at_once(parts: Parts, max_bytes: int) -> int:
    """How many rows fit, once they are widened to float32."""
    return max(1, max_bytes // (4 * width(parts)))


# ----------------


_GRADIENTS = 4  # of each example alive at once: its own, the same by layer, the rotated, its row


class StoreWriter:
    """Writes the parts of a store; those that are there are compared with the data."""

    def __init__(
        self,
        own: Examples,
        params: PyTree,
        state: PyTree,
        parts: tuple[RotatedPart, ...],
        dtype: np.dtype,
        files: StoreFolder | StoreInMemory,
        max_bytes: int,
    ) -> None:
        self._own, self._params, self._state = own, params, state
        self._parts, self._dtype, self._files = parts, dtype, files
        self._max_bytes = max_bytes
        self._each = width(parts) * dtype.itemsize

        self._rows = own.compiled(_rotated_rows, parts, dtype.name)

    def plan(self, number: int | None) -> None:
        """Print the bytes; refuse what the disk has no room for, where the number is known.

        Raises:
            OSError: the disk has less free.
        """
        if self._files.is_whole:
            return
        done = sum(part.number for part in self._files.parts)
        where, each = "memory", f"{bytes_text(self._each)} an example in {self._dtype.name}"
        if isinstance(self._files, StoreFolder):
            where = str(self._files.path)
        whole = (
            "" if number is None else f", {bytes_text(number * self._each)} for {number} examples"
        )
        print(f"jaxkfac: gradient store in {where}: {each}{whole}", file=sys.stderr)
        if number is None or not isinstance(self._files, StoreFolder):
            return
        needed, free = (number - done) * self._each, self._files.free_bytes()
        if needed > free:
            raise OSError(
                f"the gradient store needs {bytes_text(needed)} more, and the disk of "
                f"{self._files.path} has {bytes_text(free)} free: choose another path=, fewer "
                'layers=, or dtype="bfloat16"'
            )

    def run(self, train: Any) -> None:
        """Go through the data, and write what is not there yet.

        Raises:
            ValueError: data of another store, or less or more than it has.
        """
        there, sums = list(self._files.parts), None
        if there and not self._files.is_whole:
            sums = self._files.sums()
        index = -1
        for index, some in enumerate(batches_of(train)):
            data = digest_of(some)
            if index < len(there):
                if there[index].data != data:
                    raise ValueError(
                        f"train: batch {index} is not the one that the store at "
                        f"{getattr(self._files, 'path', None)} has there: give the data that it "
                        "was made of, in the same batches, or choose another path="
                    )
                continue
            if self._files.is_whole:
                raise ValueError(
                    f"train has more than the {len(there)} batches that the store holds: choose "
                    "another path="
                )
            rows, new, exists = self._of(some)
            sums = (
                new
                if sums is None
                else {name: np.asarray(sums[name] + x) for name, x in new.items()}
            )
            self._files.append(rows, data, exists, sums)
        if index + 1 < len(there):
            raise ValueError(f"train has {index + 1} batches, and the store holds {len(there)}")
        if not self._files.is_whole:
            self._files.finish()

    def _of(self, some: Any) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """Rows of one batch, sums of squares, and which examples exist."""
        own = self._own
        batch = own.checked(self._params, some, self._state)
        size = max(block_dtype(own.bases, layer).itemsize for layer in own.layers)
        at_once = fitting(
            batch,
            each=_GRADIENTS * width(self._parts) * size,
            max_bytes=self._max_bytes,
            name="train",
            remedy="choose fewer layers=",
        )
        cuts: list[Any] = [slice(None)]
        if in_examples(batch) and at_once < batch.num_examples:
            cuts = chunks(batch.num_examples, at_once)
        rows, sums = [], {}
        for cut in cuts:
            part = jax.tree.map(lambda x, cut=cut: x[cut], batch) if len(cuts) > 1 else batch
            found, squares, terms = self._rows(self._params, own.bases, part, self._state)
            rows.append(np.asarray(found))
            new = {f"{i:06d}": x for i, x in enumerate(squares)} | {"terms": terms}
            for name, x in new.items():
                sums[name] = np.asarray(sums.get(name, 0) + np.asarray(x, np.float64))
        return np.concatenate(rows), sums, np.asarray(own.exists(batch))


def _rotated_rows(
    own: Examples,
    params: PyTree,
    batch: Batch,
    state: PyTree,
    parts: tuple[RotatedPart, ...],
    dtype: str,
) -> tuple[Array, list[Array], Array]:
    """Rows of the examples, sums of their squares by part, and the number of loss terms."""
    blocks, terms = own.rotated_gradients(params, batch, state)
    return as_rows(blocks, parts).astype(dtype), rotated_squares(blocks, own.bases), terms


def measured(
    bases: Eigenbases, parts: tuple[RotatedPart, ...], stored: Mapping[str, np.ndarray]
) -> Eigenbases:
    """The bases with the eigenvalues of the sums."""
    terms = stored["terms"]
    sums, bias_sums = {}, {}
    for layer in bases.layers:  # of blocks that answer for nothing the values are not measured
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
    for index, part in enumerate(parts):
        layer, found = part.layer, stored[f"{index:06d}"]
        dtype = block_dtype(bases, layer)
        new = jnp.asarray(found.astype(dtype))
        if part.is_bias:
            bias_sums[layer.name] = new[..., 0, :]
        elif layer.is_diagonal:
            whole = dataclasses.replace(layer.weight, index=())
            matrix = whole if sums[layer.name].size == whole.size else layer.weight
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
    """How many examples there are, where that can be seen without reading them."""
    if isinstance(train, tuple):
        return len(jax.tree.leaves(train[1])[0]) if len(train) > 1 else None
    if isinstance(train, list) and all(isinstance(x, tuple) and len(x) > 1 for x in train):
        return sum(len(jax.tree.leaves(x[1])[0]) for x in train)
    return None
