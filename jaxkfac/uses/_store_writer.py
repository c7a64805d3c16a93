"""Write a gradient store batch by batch, and measure the eigenvalues on the way."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Corrections, Origin
from jaxkfac.curvature import Eigenbases
from jaxkfac.curvature.per_example import block_dtype
from jaxkfac.factors import ModelCall
from jaxkfac.memory import aligned_empty, bytes_text
from jaxkfac.uses._examples import Examples, batches_of
from jaxkfac.uses._queries import fitting, in_examples
from jaxkfac.uses._rotated_blocks import rotated_parts, rotated_squares
from jaxkfac.uses._store_files import StoreFolder, StoreInMemory, chunks, digest_of
from jaxkfac.uses._store_rows import Parts, as_rows, full_width, width

_GRADIENTS = 4  # alive for each example: the gradient, its copy by layer, the rotated one, its row


class StoreWriter:
    """Writes the batches of a store, and compares stored ones with the data."""

    def __init__(
        self,
        source: Examples,
        params: ArrayTree,
        state: ArrayTree,
        row_parts: Parts,
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
        done, where = sum(batch.number for batch in self._files.parts), "memory"
        per_example = f"{bytes_text(self._row_bytes)} an example in {self._dtype.name}"
        if ranks := {p.rank for p in self._row_parts if p.rank is not None}:
            per_example += f" at rank {min(ranks)}"
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
                'layers=, a lower rank=, or dtype="bfloat16"'
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
            example_bytes=_GRADIENTS * full_width(self._row_parts) * size,
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
            call = ModelCall(self._params, chunk, state=self._state)
            chunk_rows, squares, lost, terms = self._rows(source.bases, call)
            rows.append(np.asarray(chunk_rows))
            new = {f"{i:06d}": x for i, x in enumerate(squares)} | {"terms": terms}
            new |= {f"{i:06d}.lost": x for i, x in enumerate(lost) if x is not None}
            for name, x in new.items():
                sums[name] = np.asarray(sums.get(name, 0) + np.asarray(x, np.float64))
        joined = rows[0]
        if len(rows) > 1:  # aligned, so that products read them without a copy
            joined = aligned_empty((batch.num_examples, joined.shape[1]), joined.dtype)
            np.concatenate(rows, out=joined)
        return joined, sums, np.asarray(source.exists(batch))


def _rotated_rows(
    source: Examples, call: ModelCall, row_parts: Parts, dtype: str
) -> tuple[Array, list[Array], list[Array | None], Array]:
    """Rows of the examples, sums of squares by part, of losses by part, and number of terms.

    The sums of squares are those of the gradients, not of what a low rank keeps of them.
    """
    blocks, terms = source.rotated_gradients(call)
    rows, errors = as_rows(blocks, row_parts)
    lost = [None if x is None else jnp.square(x).sum() for x in errors]
    return rows.astype(dtype), rotated_squares(blocks, source.bases), lost, terms


def measured(bases: Eigenbases, stored: Mapping[str, np.ndarray]) -> Eigenbases:
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
    for index, block in enumerate(rotated_parts(bases)):
        layer, squares = block.layer, stored[f"{index:06d}"]
        dtype = block_dtype(bases, layer)
        new = jnp.asarray(squares.astype(dtype))
        if block.is_bias:
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


def known_number(train: object) -> int | None:
    """Number of examples, if it is known without reading them."""
    if isinstance(train, tuple):
        return len(jax.tree.leaves(train[1])[0]) if len(train) > 1 else None
    if isinstance(train, list) and all(isinstance(x, tuple) and len(x) > 1 for x in train):
        return sum(len(jax.tree.leaves(x[1])[0]) for x in train)
    return None


def errors_of(row_parts: Parts, files: StoreFolder | StoreInMemory) -> dict[str, float]:
    """For each layer, the root mean square of what low rank loses of an example's gradient."""
    errors = dict.fromkeys((p.name for p in row_parts), 0.0)
    if all(p.rank is None for p in row_parts):
        return errors
    sums, number = files.sums(), sum(batch.exists.count("1") for batch in files.parts)
    for index, row_part in enumerate(row_parts):
        if row_part.rank is not None:
            lost = float(sums[f"{index:06d}.lost"])
            errors[row_part.name] = (lost / max(number, 1)) ** 0.5
    return errors
