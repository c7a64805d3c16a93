"""Factors to eigenbases."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxkfac.curvature._eigenbases import Eigenbases
from jaxkfac.curvature._placement import (
    Placement,
    check_placement,
    device_of,
    is_on_host,
    is_traced,
    matrices_that_fit,
)
from jaxkfac.curvature._sharding import put_result, result_sharding
from jaxkfac.factors import DiagonalFactor, Factors
from jaxkfac.linalg import (
    HostDType,
    Spectrum,
    check_clipping,
    eigh_checked,
    eigh_in_turn,
    eigh_on_host,
    host_dtype,
)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A matrix to decompose, the table and key it goes to, and its name in errors."""

    table: str
    key: str
    name: str
    matrix: Array | np.ndarray


def eigendecompose(
    factors: Factors,
    *,
    max_condition: float = 1e6,
    floor: float = 0.0,
    placement: Placement = "auto",
    vectors: bool = True,
    dtype: DTypeLike = "float64",
) -> Eigenbases:
    r"""Eigendecompose every factor of a model, each distinct one once.

    Layers that read the same input share one decomposition of A. Where some of them have a
    joint bias and others none, the A without its ones row and column is decomposed as well,
    because its eigenvectors are others.

    On an accelerator there is one batched call for each distinct size, over stacks and
    layers. On the CPU, which decomposes one matrix at a time whatever the batch, and on the
    host there is one call for each factor, so that the peak is that of one layer.

    The host decomposes in float64 and rounds the results to the factors' dtype: the error of
    a float32 decomposition is divided by the smallest eigenvalues. A device decomposes in the
    factors' dtype.

    Args:
        factors: Sums and counts; their means are decomposed.
        max_condition: $\kappa \ge 1$: values read as at least $\lambda_{\max}/\kappa$.
        floor: Values read as at least this, in the factor's own units.
        placement: ``"device"``: where the factors live. ``"host"``: in host memory; results
            return to where the factors live. ``"auto"``: ``"device"`` inside a trace;
            ``"host"`` on the CPU; on an accelerator, on the device in batches whose
            workspace of ``3 n**2`` elements fits in half of the free memory, and on the host
            where one alone does not. No factor is left out.
        vectors: ``False`` keeps the values only, for spectra and capacity: the same values,
            bit by bit, and the same work.
        dtype: In which the host decomposes, ``"float64"`` or ``"float32"``. Factors in
            float64 are decomposed in float64 whatever it is.

    Returns:
        The bases, in the factors' dtype. Raw values are stored; clipping is on read.

    Raises:
        ValueError: ``max_condition < 1``, ``floor < 0``, an unknown ``placement`` or ``dtype``,
            or ``"host"`` inside a trace.
        TypeError: ``factors`` are none, but a gradient, say.
        NonFiniteFactorError: naming the layer; outside a trace with ``"auto"`` and
            ``"host"``, after a retry on the host.
            Inside a trace and with ``"device"`` nothing raises: the values of that factor
            are NaN, and ``bases.is_finite()`` says so.

    Memory:
        The results (``n**2 + n`` elements for each factor of size ``n``), one batch of
        inputs, and the workspace; on the host 36 bytes times ``n**2`` for float32 factors,
        16 with ``dtype="float32"``.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> bases = jk.eigendecompose(factors, max_condition=1e3)
        >>> bases["kernel"].g_values.round(3), bases["kernel"].a_vectors.shape
        (Array([0.002, 2.   ], dtype=float32), (3, 3))

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015.
    """
    if not isinstance(factors, Factors):
        raise TypeError(
            "factors: expected Factors, as jk.value_grad_and_factors(...) gives them beside value "
            f"and gradient, got {type(factors).__name__}"
        )
    check_clipping(max_condition, floor)
    check_placement(placement)
    on_host = functools.partial(_on_host, vectors=vectors, dtype=host_dtype(dtype))
    blocks, tables = _split(factors)
    if placement == "host" and any(is_traced(block.matrix) for block in blocks):
        raise ValueError(
            "placement='host' needs concrete factors, and these are traced; inside jit use "
            "'auto' or 'device', or call eigendecompose outside"
        )
    for block, spectrum in _decompose(blocks, placement, vectors, on_host):
        tables[block.table][block.key] = spectrum
    return Eigenbases(
        a=tables["a"],
        a_without_ones=tables["a_without_ones"],
        g=tables["g"],
        diagonals=tables["diagonals"],
        layers=factors.layers,
        bias=factors.bias,
        max_condition=max_condition,
        floor=floor,
    )


def _split(factors: Factors) -> tuple[list[_Block], dict[str, dict[str, Any]]]:
    """The dense blocks to decompose, and the tables with the diagonal ones in place."""
    blocks: list[_Block] = []
    tables: dict[str, dict[str, Any]] = {"a": {}, "a_without_ones": {}, "g": {}, "diagonals": {}}
    seen = set()
    for layer in factors.layers:
        means = factors[layer.name]
        if isinstance(means, DiagonalFactor):
            tables["diagonals"][layer.name] = jnp.asarray(means.diagonal)
            continue
        mixed = factors.has_ones(layer.input) and not factors.wants_ones(layer)
        a_place = ("a_without_ones" if mixed else "a", layer.input)
        for (table, key), mean, dense in (
            (a_place, means.a, layer.a_dense),
            (("g", layer.name), means.g, layer.g_dense),
        ):
            if (table, key) in seen:
                continue
            seen.add((table, key))
            if dense:
                side = "G" if table == "g" else "A"
                blocks.append(_Block(table, key, f"{side} of layer {layer.name!r}", mean))
            else:
                tables[table][key] = Spectrum(jnp.asarray(mean), None)
    return blocks, tables


def _decompose(
    blocks: list[_Block],
    placement: Placement,
    vectors: bool,
    solve_on_host: Callable[[_Block], Spectrum],
) -> list[tuple[_Block, Spectrum]]:
    if placement == "host":
        return [(block, solve_on_host(block)) for block in blocks]
    groups: dict[Any, list[_Block]] = defaultdict(list)
    results: list[tuple[_Block, Spectrum]] = []
    for block in blocks:
        matrix = block.matrix
        on_host = isinstance(matrix, np.ndarray)  # of a byte budget: too much for the device
        if on_host and placement == "auto":
            results.append((block, solve_on_host(block)))
            continue
        where = frozenset()
        if not on_host and not is_traced(matrix):
            where = frozenset(matrix.sharding.device_set)
        groups[matrix.shape[-1], matrix.dtype, where].append(block)
    for (n, dtype, _), members in groups.items():
        first = members[0].matrix
        checked = placement == "auto" and not is_traced(first)
        limit = matrices_that_fit(n, dtype, device_of(first)) if checked else None
        is_host = limit is None and checked and device_of(first).platform == "cpu"
        if checked and (limit == 0 or is_host or is_on_host(first)):
            results += [(block, solve_on_host(block)) for block in members]
            continue
        after = results[-1][1].values if results and is_traced(first) else None
        spectra = _of_one_size([jnp.asarray(b.matrix) for b in members], limit, vectors, after)
        for block, spectrum in zip(members, spectra, strict=True):
            if checked and not np.isfinite(np.asarray(spectrum.values)).all():
                spectrum = solve_on_host(block)
            results.append((block, spectrum))
    return results


def _of_one_size(
    matrices: list[Array], limit: int | None, vectors: bool, after: Array | None
) -> list[Spectrum]:
    """In turn on the CPU; elsewhere in one call, or a few where ``limit`` fit at once."""
    in_turn = functools.partial(eigh_in_turn, vectors=vectors, after=after)
    batched = functools.partial(_batched, limit=limit, vectors=vectors)
    if limit is not None:
        return batched(matrices)
    if not is_traced(matrices[0]):
        return (in_turn if device_of(matrices[0]).platform == "cpu" else batched)(matrices)
    return jax.lax.platform_dependent(matrices, cpu=in_turn, default=batched)


def _batched(matrices: list[Array], *, limit: int | None, vectors: bool) -> list[Spectrum]:
    n = matrices[0].shape[-1]
    rows = [matrix.reshape(-1, n, n) for matrix in matrices]
    batch = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
    step = max(limit or len(batch), 1)
    parts = [eigh_checked(batch[i : i + step], vectors=vectors) for i in range(0, len(batch), step)]
    values = jnp.concatenate([part.values for part in parts])
    columns = [part.vectors for part in parts if part.vectors is not None]
    columns = jnp.concatenate(columns) if vectors else None
    results, start = [], 0
    for matrix, own in zip(matrices, rows, strict=True):
        stop = start + len(own)
        own_columns = None if columns is None else columns[start:stop].reshape(matrix.shape)
        results.append(Spectrum(values[start:stop].reshape(matrix.shape[:-1]), own_columns))
        start = stop
    return results


def _on_host(block: _Block, *, vectors: bool, dtype: HostDType) -> Spectrum:
    values, columns = eigh_on_host(block.matrix, name=block.name, vectors=vectors, dtype=dtype)
    where = result_sharding(block.matrix)
    placed = None if columns is None else put_result(columns, where)
    return Spectrum(put_result(values, where), placed)
