"""Gradients of training examples in the eigenbasis, computed once for all queries."""

import dataclasses
import hashlib
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PyTree

from jaxkfac._checks import at_least_one
from jaxkfac._text import number as number_text
from jaxkfac.curvature import (
    BlockDamping,
    Eigenbases,
    RotatedPart,
    check_bases,
    check_block_damping,
    check_disjoint,
    owned_blocks,
    rotated_parts,
    rotated_squares,
)
from jaxkfac.factors import Batch, Corrections, Objective, Origin
from jaxkfac.interception import Layer, Word, partition
from jaxkfac.memory import ByteSize, bytes_text, parse_bytes
from jaxkfac.uses._batches import batches_of
from jaxkfac.uses._example_gradients import block_dtype
from jaxkfac.uses._examples import Examples, chosen
from jaxkfac.uses._fitting import fitting, in_examples
from jaxkfac.uses._held import Queries
from jaxkfac.uses._store_files import StoreFolder, StoreInMemory, chunks
from jaxkfac.uses._stored_products import (
    as_rows,
    heuristic_weights_of,
    own_products,
    products,
    rotated_queries,
    rows_at_once,
    weights_of,
    width,
)

_GRADIENTS = 4  # of each example alive at once: its own, the same by layer, the rotated, its row
_READ = 2**26  # bytes of rows, widened, that are multiplied at once
_DTYPES = ("bfloat16", "float32", "float64")


class GradientStore:
    """Training examples' gradients in the eigenbasis, as :func:`gradient_store` gives them.

    ``influence`` and ``self_influence`` take it in place of the training set.

    Attributes:
        bases: The bases, with eigenvalues measured on the stored gradients where they had none.
        layers: The layers that are read.
        path: The store's folder, or ``None``: it is in memory.
        dtype: Of the stored numbers.
    """

    def __init__(
        self,
        objective: Objective,
        bases: Eigenbases,
        files: StoreFolder | StoreInMemory,
        about: Mapping[str, Any],
        dtype: np.dtype,
    ) -> None:
        self.bases, self.layers, self.dtype = bases, bases.layers, dtype
        self.path = files.path if isinstance(files, StoreFolder) else None
        self._objective, self._files, self._about = objective, files, dict(about)
        self._parts = rotated_parts(bases)
        self._seen: list[weakref.ref[Any]] = []

    def __len__(self) -> int:
        """How many examples there are."""
        return sum(part.number for part in self._files.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored gradients."""
        return self._files.nbytes

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"at {self.path}"
        return (
            f"GradientStore({len(self)} examples of {number_text(width(self._parts))} numbers, "
            f"{self.dtype.name}, {bytes_text(self.nbytes)} {where})"
        )

    def check(
        self,
        objective: Objective,
        params: PyTree,
        bases: Eigenbases | None,
        state: PyTree | None = None,
    ) -> None:
        """Refuse what the store is not of.

        Args:
            objective: That scores are asked for.
            params: Parameters.
            bases: The bases, or ``None``: those of the store.
            state: Of the model.

        Raises:
            ValueError: another objective, parameters, state, or eigenvectors; what differs is
                named.
        """
        if objective != self._objective:
            raise ValueError(
                "the store is of another objective: pass the one that it was made with, or open it "
                "with this one, jk.gradient_store(objective, params, bases, None, path=...)"
            )
        leaves = jax.tree.leaves((params, state))
        if any(isinstance(x, Tracer) for x in leaves):
            raise TypeError("a gradient store is read on the host: call this outside jax.jit")
        if len(leaves) != len(self._seen) or any(
            seen() is not leaf for seen, leaf in zip(self._seen, leaves, strict=True)
        ):
            found = {"parameters": _digest(partition(params)[0]), "state": _digest(state)}
            for what, digest in found.items():
                if digest != self._about[what]:
                    raise ValueError(
                        f"the store is of other {what}, with digest {self._about[what]} in place "
                        f"of {digest}: make one of these with jk.gradient_store"
                    )
            if all(isinstance(x, jax.Array) for x in leaves):  # others may change in place
                self._seen = [weakref.ref(x) for x in leaves]
        if bases is not None and bases is not self.bases:
            check_bases(bases)
            mine = {layer.name for layer in self.layers}
            some = dataclasses.replace(
                bases, layers=tuple(x for x in bases.layers if x.name in mine)
            )
            if some.layers != self.layers or _vectors_digest(some) != self._about["eigenvectors"]:
                raise ValueError(
                    "the store is of gradients in other eigenbases: pass store.bases, or make a "
                    "store in these"
                )

    def scores(
        self, queries: Queries, layers: str | None, *, by_layer: bool
    ) -> Iterator[tuple[Float[Array, "..."], Bool[Array, " n"]]]:
        """The scores of some examples after the other, and which of them have a loss term.

        Raises:
            ValueError: the queries have a layer that the store has not, or layers that read one
                parameter are to be told apart.
        """
        self._names(queries.layers, by_layer=False)
        names = self._names(chosen(queries, layers).layers, by_layer=by_layer)
        turned = rotated_queries(queries, self._restricted(queries.layers))
        parts = rotated_parts(self._restricted(queries.layers))
        places = self._places(parts)
        for rows, exist in self._chunks():
            found = products(self._some(rows, places), turned, parts, names)
            yield (found if by_layer else found.sum(1)), jnp.asarray(exist)

    def own_products(
        self, bases: Eigenbases | None, damping: BlockDamping, layers: str | None
    ) -> Float[Array, " N"]:
        """Each example's score with itself."""
        used = self.bases if bases is None else dataclasses.replace(bases, layers=self.layers)
        names = self._names(chosen(used, layers).layers, by_layer=False)
        check_block_damping(damping, used)
        if isinstance(damping, str):
            weights = heuristic_weights_of(used)
        else:
            weights = weights_of(used, damping)
        found = [
            own_products(jnp.asarray(rows), weights, self._parts, names)
            for rows, _ in self._chunks()
        ]
        return jnp.concatenate(found)

    # -- parts ------------------------------------------------------------------------

    def _names(self, layers: tuple[Layer, ...], *, by_layer: bool) -> tuple[str, ...]:
        """Layers whose parts are multiplied, once they stand for the gradients that are meant."""
        stored = {part.layer.name for part in self._parts}
        mine, wanted = {x.name for x in self.layers}, {x.name for x in layers}
        if absent := [x.name for x in layers if x not in self.layers]:
            raise ValueError(
                f"the store does not have layer {absent[0]!r}: it is of {sorted(mine)}; choose "
                "among these with layers=, or make a store of more"
            )
        readers: dict[Any, set[str]] = {}
        for layer in self.layers:
            for matrix in (layer.weight, layer.bias):
                if matrix is not None:
                    readers.setdefault((matrix.path, matrix.index), set()).add(layer.name)
        for (path, _), names in readers.items():
            apart = names & wanted and (by_layer or not names <= wanted)
            if len(names) > 1 and apart:
                raise ValueError(
                    f"layers {sorted(names)} read the same elements of {path!r}, whose gradients "
                    "are stored as their sum: score the training set itself to tell them apart"
                )
        return tuple(x.name for x in layers if x.name in stored)

    def _restricted(self, layers: tuple[Layer, ...]) -> Eigenbases:
        """The bases with the queries' layers."""
        return dataclasses.replace(self.bases, layers=layers)

    def _places(self, parts: tuple[RotatedPart, ...]) -> list[slice] | None:
        """Where parts of fewer layers lie in a row; ``None``: they are all of it."""
        if parts == self._parts:
            return None
        places, start = [], 0
        for part in self._parts:
            if part in parts:
                places.append(slice(start, start + part.size))
            start += part.size
        return places

    def _some(self, rows: np.ndarray, places: list[slice] | None) -> Array:
        return jnp.asarray(
            rows if places is None else np.concatenate([rows[:, x] for x in places], 1)
        )

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows, and which of their examples exist."""
        for index, part in enumerate(self._files.parts):
            rows = self._files.rows(index)
            exists = np.array([bit == "1" for bit in part.exists])
            for some in chunks(part.number, rows_at_once(self._parts, _READ)):
                yield rows[some], exists[some]


def gradient_store(
    objective: Objective,
    params: PyTree,
    bases: Eigenbases,
    train: Any,
    path: str | os.PathLike[str] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    layers: str | None = None,
    num_examples: int | None = None,
    state: PyTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    max_bytes: ByteSize = 2**28,
) -> GradientStore:
    r"""Each training example's gradient in the eigenbasis, $Q_A^\top \nabla \ell_n Q_G$, stored.

    One pass over the training set writes the gradients and measures the eigenvalues (EKFAC) on
    them. After it, scores of new queries take no backward pass over the training set:
    :func:`influence` and :func:`self_influence` take the store in its place.

    The eigenvalues are second moments of the gradients at the given targets,
    ``correct_eigenvalues(..., fisher="empirical")``. Bases that hold measured eigenvalues keep
    them (those of sampled labels, say), and so do bases of an objective with several outputs.

    Args:
        objective: As for :func:`influence`, like all that is not named here.
        params: Parameters.
        bases: Eigenbases with all vectors.
        train: ``(inputs, targets)`` or ``(inputs, targets, mask)``, or an iterable of such tuples,
            read once. ``None`` opens the store at ``path``.
        path: A folder for the store; ``None`` keeps it in host memory. Where the folder holds a
            store of these arguments it is opened, and ``train``, if given, is compared with it.
            One that was stopped is gone on with: batches that are there take no backward pass.
        dtype: ``bfloat16``, ``float32`` or ``float64``.
        layers: Likewise.
        num_examples: How many examples ``train`` has, to plan the bytes where it is an iterable
            of unknown length.
        state: Likewise.
        experts: Likewise.
        examples: Likewise.
        max_bytes: What gradients of examples may take on the device at once, a number or
            ``"256MiB"``: a batch is cut into as many examples as fit, at least one.

    Returns:
        A :class:`GradientStore`; ``store.bases`` are the bases with the measured eigenvalues.

    Raises:
        MemoryBudgetError: the gradients of one example do not fit into ``max_bytes``.
        FileNotFoundError: ``train`` is ``None``, and there is no store at ``path``.
        ValueError: the folder holds a store of another model, objective, dtype, of other
            eigenvectors or of other data, which is named; bases without all vectors
            (``rank=``); two layers that answer for the same elements; else as for
            :func:`influence`.
        DamagedFileError: a file of the store is cut short, or not what was written.
        OSError: the disk is full. What was written is kept, and nothing is at ``path`` yet.

    Memory:
        As many numbers for each example as the layers have parameters, in ``dtype``; the bytes are
        printed before anything is written. While it is written, the sums of squares twice, in
        float64 in host memory.

    Example:
        >>> store = jk.gradient_store(objective, params, bases, batch, dtype="float32")
        >>> scores = jk.influence(objective, params, store.bases, batch, store)
        >>> plain = jk.influence(objective, params, store.bases, batch, batch)
        >>> bool(jnp.allclose(scores, plain, rtol=1e-3, atol=1e-3))
        True

    References:
        Thomas George et al., "Fast Approximate Natural Gradient Descent in a
        Kronecker-factored Eigenbasis", 2018.
    """
    kind = _checked_dtype(dtype)
    budget = parse_bytes(max_bytes, name="max_bytes")
    if num_examples is not None:
        at_least_one(num_examples=num_examples)
    own = Examples(objective, bases, layers, experts, examples)
    bases, parts = own.bases, rotated_parts(own.bases)
    shapes = {name: jnp.shape(leaf) for name, leaf in partition(params)[0].items()}
    check_disjoint(owned_blocks(bases), shapes)
    about = {
        "parameters": _digest(partition(params)[0]),
        "state": _digest(state),
        "eigenvectors": _vectors_digest(bases),
        "layers": f"{len(bases.layers)} layers {_hash(repr(bases.layers).encode())}",
        "likelihood": str(objective.likelihood),
        "dtype": kind.name,
    }
    files: StoreFolder | StoreInMemory = StoreInMemory()
    if path is not None:
        files = StoreFolder(Path(path), about, width(parts), kind)
    if train is None:
        if not files.is_whole:
            raise FileNotFoundError(f"train is None, and there is no whole store at {path}")
    else:
        writer = _Writer(own, params, state, parts, kind, files, budget)
        writer.plan(_known_number(train) if num_examples is None else num_examples)
        writer.run(train)
    if bases.corrections is None and objective.num_outputs == 1:
        bases = _measured(bases, parts, files.sums())
    return GradientStore(objective, bases, files, about, kind)


class _Writer:
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
            data = _digest(some)
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


def _measured(
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


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r}: expected one of {', '.join(_DTYPES)}")
    return np.dtype(getattr(ml_dtypes, name, name))


def _known_number(train: Any) -> int | None:
    """How many examples there are, where that can be seen without reading them."""
    if isinstance(train, tuple):
        return len(jax.tree.leaves(train[1])[0]) if len(train) > 1 else None
    if isinstance(train, list) and all(isinstance(x, tuple) and len(x) > 1 for x in train):
        return sum(len(jax.tree.leaves(x[1])[0]) for x in train)
    return None


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _digest(tree: PyTree) -> str:
    """Of paths, dtypes, shapes and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.ascontiguousarray(np.asarray(leaf))
        about = jax.tree_util.keystr(path), array.dtype.name, np.shape(leaf)
        found.update(repr(about).encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _vectors_digest(bases: Eigenbases) -> str:
    """Digest of the eigenvectors; the store is the same for other eigenvalues."""
    vectors = {
        layer.name: [spectrum.vectors for spectrum in bases.spectra(layer)]
        for layer in bases.layers
        if not layer.is_diagonal
    }
    return _digest(vectors)
