"""Gradients of training examples in the eigenbasis, computed once and used for all queries."""

import dataclasses
import os
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
from jaxtyping import Array, Bool, Float

from jaxkfac._arguments import ArrayTree, partition
from jaxkfac._errors import at_least_one
from jaxkfac._text import number as number_text
from jaxkfac.curvature import Eigenbases, check_bases
from jaxkfac.curvature.per_example import Queries
from jaxkfac.factors import Objective
from jaxkfac.interception import Layer
from jaxkfac.interception.coupling import Word
from jaxkfac.memory import ByteSize, bytes_text, parse_bytes
from jaxkfac.uses._damped_gradients import (
    BlockDamping,
    check_block_damping,
    check_disjoint,
    owned_blocks,
)
from jaxkfac.uses._examples import Examples, check_values, chosen, is_measured
from jaxkfac.uses._store_files import (
    StoreFolder,
    StoreInMemory,
    chunks,
    digest_of,
    short_hash,
)
from jaxkfac.uses._store_rows import (
    Parts,
    check_rank,
    heuristic_weights_of,
    own_products,
    products,
    rotated_queries,
    row_parts,
    rows_at_once,
    weights_of,
    width,
)
from jaxkfac.uses._store_writer import StoreWriter, errors_of, known_number, measured

_READ = 2**27  # bytes of rows, widened, that are multiplied at a time
_DTYPES = ("bfloat16", "float32", "float64")


class GradientStore:
    """Training examples' gradients in the eigenbasis, as :func:`gradient_store` returns them.

    ``influence`` and ``self_influence`` take it in place of the training set.

    Attributes:
        bases: The bases; if they had no measured eigenvalues, with those of the stored gradients.
        layers: The layers whose gradients are stored.
        path: The store's folder, or ``None`` if it is in memory.
        dtype: The dtype of the stored numbers.
        rank: Rank at which layers are stored where that is smaller, or ``None``.
        errors: For each layer, what the low rank loses of an example's gradient: the root mean
            square over examples of the ratio of Frobenius norms; 0 if nothing is lost.
    """

    def __init__(
        self,
        objective: Objective,
        bases: Eigenbases,
        files: StoreFolder | StoreInMemory,
        about: Mapping[str, Any],
        dtype: np.dtype,
        rank: int | None,
    ) -> None:
        self.bases, self.layers, self.dtype, self.rank = bases, bases.layers, dtype, rank
        self.path = files.path if isinstance(files, StoreFolder) else None
        self._objective, self._files, self._about = objective, files, dict(about)
        self._row_parts = row_parts(bases, rank)
        self.errors = errors_of(self._row_parts, files)
        self._checked_leaves: list[weakref.ref[Any]] = []

    def __len__(self) -> int:
        """Number of examples."""
        return sum(batch.number for batch in self._files.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored gradients."""
        return self._files.nbytes

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"at {self.path}"
        return (
            f"GradientStore({len(self)} examples of {number_text(width(self._row_parts))} numbers, "
            f"{self._precision}, {bytes_text(self.nbytes)} {where})"
        )

    def __str__(self) -> str:
        if not self.errors:
            return repr(self)
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"{self!r}\nof an example's gradient, the rank loses at most "
            f"{self.errors[worst]:.1%} of its norm, in {worst}"
        )

    @property
    def _precision(self) -> str:
        return self.dtype.name + ("" if self.rank is None else f" at rank {self.rank}")

    def check(
        self,
        objective: Objective,
        params: ArrayTree,
        bases: Eigenbases | None,
        state: ArrayTree | None = None,
    ) -> None:
        """Refuse a call that does not match the store.

        Args:
            objective: The objective of the scores.
            params: Parameters.
            bases: The bases, or ``None`` for those of the store.
            state: State of the model.

        Raises:
            ValueError: another objective, parameters, state, or eigenvectors; the difference is
                named.
        """
        if objective != self._objective:
            raise ValueError(
                "the store belongs to another objective: pass the one that it was made with, or "
                "open it "
                "with this one, jk.gradient_store(objective, params, bases, None, path=...)"
            )
        leaves = jax.tree.leaves((params, state))
        if any(isinstance(x, Tracer) for x in leaves):
            raise TypeError("a gradient store is read on the host: call this outside jax.jit")
        if len(leaves) != len(self._checked_leaves) or any(
            reference() is not leaf
            for reference, leaf in zip(self._checked_leaves, leaves, strict=True)
        ):
            digests = {"parameters": digest_of(partition(params)[0]), "state": digest_of(state)}
            for what, digest in digests.items():
                if digest != self._about[what]:
                    raise ValueError(
                        f"the store belongs to other {what}, with digest {self._about[what]} in "
                        f"place "
                        f"of {digest}: make one of these with jk.gradient_store"
                    )
            if all(isinstance(x, jax.Array) for x in leaves):  # NumPy arrays may change in place
                self._checked_leaves = [weakref.ref(x) for x in leaves]
        if bases is not None and bases is not self.bases:
            check_bases(bases)
            mine = {layer.name for layer in self.layers}
            some = dataclasses.replace(
                bases, layers=tuple(x for x in bases.layers if x.name in mine)
            )
            if some.layers != self.layers or _vectors_digest(some) != self._about["eigenvectors"]:
                raise ValueError(
                    "the store has gradients in other eigenbases: pass store.bases, or make a "
                    "store with these"
                )

    def scores(
        self, queries: Queries, layers: str | None, *, by_layer: bool
    ) -> Iterator[tuple[Float[Array, "..."], Bool[Array, " n"]]]:
        """Yield the scores of successive examples, and which of these have a loss term.

        Raises:
            ValueError: the queries have a layer that the store lacks, or scores by layer are
                requested for layers that read one parameter.
        """
        self._names(queries.layers, by_layer=False)
        names = self._names(chosen(queries, layers).layers, by_layer=by_layer)
        turned = rotated_queries(queries, self._restricted(queries.layers))
        query_parts = row_parts(self._restricted(queries.layers), self.rank)
        places = self._places(query_parts)
        for rows, exist in self._chunks():
            scores = products(self._some(rows, places), turned, query_parts, names)
            yield (scores if by_layer else scores.sum(1)), jnp.asarray(exist)

    def own_products(
        self, bases: Eigenbases | None, damping: BlockDamping, layers: str | None
    ) -> Float[Array, " N"]:
        """Each example's score with itself."""
        used = self.bases if bases is None else dataclasses.replace(bases, layers=self.layers)
        names = self._names(chosen(used, layers).layers, by_layer=False)
        check_block_damping(damping, used)
        check_values(used)
        if isinstance(damping, str):
            weights = heuristic_weights_of(used)
        else:
            weights = weights_of(used, damping)
        by_chunk = [
            own_products(self._some(rows, None), weights, self._row_parts, names)
            for rows, _ in self._chunks()
        ]
        return jnp.concatenate(by_chunk)

    # -- parts of a row ---------------------------------------------------------------

    def _names(self, layers: tuple[Layer, ...], *, by_layer: bool) -> tuple[str, ...]:
        """The layers whose parts are multiplied, after checking that these are the gradients."""
        stored = {row_part.name for row_part in self._row_parts}
        mine, chosen_names = {x.name for x in self.layers}, {x.name for x in layers}
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
            separated = names & chosen_names and (by_layer or not names <= chosen_names)
            if len(names) > 1 and separated:
                raise ValueError(
                    f"layers {sorted(names)} read the same elements of {path!r}, whose gradients "
                    "are stored as their sum: score the training set itself to tell them apart"
                )
        return tuple(x.name for x in layers if x.name in stored)

    def _restricted(self, layers: tuple[Layer, ...]) -> Eigenbases:
        """The bases restricted to the queries' layers."""
        return dataclasses.replace(self.bases, layers=layers)

    def _places(self, chosen_parts: Parts) -> list[slice] | None:
        """Where the parts of fewer layers are in a row; ``None`` if they are all of it."""
        if chosen_parts == self._row_parts:
            return None
        places, start = [], 0
        for row_part in self._row_parts:
            if row_part in chosen_parts:
                places.append(slice(start, start + row_part.size))
            start += row_part.size
        return places

    def _some(self, rows: np.ndarray, places: list[slice] | None) -> Array:
        if places is not None:
            rows = np.concatenate([rows[:, x] for x in places], 1)
        return jax.device_put(rows, may_alias=True)  # nobody writes to stored rows

    def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield rows, and which of their examples exist."""
        for index, batch in enumerate(self._files.parts):
            rows = self._files.rows(index)
            exists = np.array([bit == "1" for bit in batch.exists])
            for some in chunks(batch.number, rows_at_once(self._row_parts, _READ)):
                yield rows[some], exists[some]


def gradient_store(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases,
    train: Any,
    path: str | os.PathLike[str] | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    *,
    rank: int | None = None,
    layers: str | None = None,
    num_examples: int | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
    max_bytes: ByteSize = 2**28,
) -> GradientStore:
    r"""Store each training example's gradient in the eigenbasis, $Q_A^\top \nabla \ell_n Q_G$.

    One pass over the training set writes the gradients and measures the eigenvalues (EKFAC) on
    them. Afterwards, scores of new queries take no backward pass over the training set:
    :func:`influence` and :func:`self_influence` take the store in its place.

    The eigenvalues are second moments of the gradients at the given targets, as in
    ``correct_eigenvalues(..., fisher="empirical")``. Bases that already have measured eigenvalues
    keep them (for example those of sampled labels). Bases of an objective with several outputs keep
    their eigenvalues, too.

    Args:
        objective: As for :func:`influence`.
        params: Parameters.
        bases: Eigenbases with all vectors.
        train: ``(inputs, targets)`` or ``(inputs, targets, mask)``, or an iterable of such tuples,
            read once. ``None`` opens the store at ``path``.
        path: A folder for the store; ``None`` keeps it in host memory. If the folder holds a
            store of these arguments, it is opened, and ``train``, if given, is compared with it.
            An interrupted store is continued: batches in it take no backward pass.
        dtype: ``bfloat16``, ``float32`` or ``float64``.
        rank: Store each layer's part of a gradient, a matrix, as two factors of this rank, where
            that takes fewer numbers: $r (m + n)$ in place of $m n$. Nothing is lost of a layer that
            an example passes at $r$ positions at most. The eigenvalues are those of the full
            gradients.
        layers: As for :func:`influence`.
        num_examples: Number of examples in ``train``, to plan the bytes if it is an iterable
            of unknown length.
        state: As for :func:`influence`.
        experts: As for :func:`influence`.
        examples: As for :func:`influence`.
        max_bytes: Most bytes of gradients of examples on the device at once, a number or
            ``"256MiB"``: a batch is split into as many examples as fit, at least one.

    Returns:
        A :class:`GradientStore`; ``store.bases`` are the bases with the measured eigenvalues.

    Raises:
        MemoryBudgetError: the gradients of one example do not fit into ``max_bytes``.
        FileNotFoundError: ``train`` is ``None``, and there is no store at ``path``.
        ValueError: the folder holds a store of other parameters, state, layers, likelihood, dtype,
            rank, eigenvectors or data (the difference is named; a function of the model that
            changed while all of these stayed, as an activation, is not seen); bases without all
            vectors (``eigendecompose(rank=)``); a ``rank`` above the shorter side of every layer,
            the widest of which is named; two layers that own the same elements; otherwise as for
            :func:`influence`.
        NonFiniteFactorError: as for :func:`influence`.
        DamagedFileError: a file of the store is truncated, or its content has changed.
        OSError: the disk is full. What was written is kept, and nothing is at ``path`` yet.

    Memory:
        As many numbers for each example as the layers have parameters, or fewer with ``rank``, in
        ``dtype``; the bytes are printed before anything is written. While writing, two copies of
        the sums of squares in float64 in host memory.

    Example:
        >>> store = jk.gradient_store(objective, params, bases, batch, dtype="float32")
        >>> scores = jk.influence(objective, params, store.bases, batch, store)
        >>> plain = jk.influence(objective, params, store.bases, batch, batch)
        >>> bool(jnp.allclose(scores, plain, rtol=1e-3, atol=1e-3))
        True
        >>> small = jk.gradient_store(objective, params, bases, batch, rank=1)
        >>> small.nbytes < store.nbytes / 2
        True

    References:
        Thomas George et al., "Fast Approximate Natural Gradient Descent in a
        Kronecker-factored Eigenbasis", 2018.

        Roger Grosse et al., "Studying Large Language Model Generalization with Influence
        Functions", 2023: gradients of queries at low rank.
    """
    kind = _checked_dtype(dtype)
    budget = parse_bytes(max_bytes, name="max_bytes")
    if num_examples is not None:
        at_least_one(num_examples=num_examples)
    if rank is not None:
        at_least_one(rank=rank)
    source = Examples(objective, bases, layers, experts, examples)
    bases = source.bases
    check_values(bases)
    if rank is not None:
        check_rank(bases, rank)
    parts = row_parts(bases, rank)
    shapes = {name: jnp.shape(leaf) for name, leaf in partition(params)[0].items()}
    check_disjoint(owned_blocks(bases), shapes)
    about = {
        "parameters": digest_of(partition(params)[0]),
        "state": digest_of(state),
        "eigenvectors": _vectors_digest(bases),
        "layers": f"{len(bases.layers)} layers {short_hash(repr(bases.layers).encode())}",
        "likelihood": str(objective.likelihood),
        "dtype": kind.name,
    }
    about |= {} if rank is None else {"rank": rank}
    files: StoreFolder | StoreInMemory = StoreInMemory()
    if path is not None:
        files = StoreFolder(Path(path), about, width(parts), kind)
    if train is None:
        if not files.is_whole:
            raise FileNotFoundError(f"train is None, and there is no whole store at {path}")
    else:
        writer = StoreWriter(source, params, state, parts, kind, files, budget)
        writer.plan(known_number(train) if num_examples is None else num_examples)
        writer.run(train)
    if not is_measured(bases) and objective.num_outputs == 1:
        bases = measured(bases, files.sums())
    return GradientStore(objective, bases, files, about, kind, rank)


def _checked_dtype(dtype: DTypeLike) -> np.dtype:
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r}: expected one of {', '.join(_DTYPES)}")
    return np.dtype(getattr(ml_dtypes, name, name))


def _vectors_digest(bases: Eigenbases) -> str:
    """Digest of the eigenvectors; the store does not depend on the eigenvalues."""
    vectors = {
        layer.name: [spectrum.vectors for spectrum in bases.spectra(layer)]
        for layer in bases.layers
        if not layer.is_diagonal
    }
    return digest_of(vectors)
