"""Decompose factors into eigenbases, and rebuild factors from them."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, DTypeLike

from jaxkfac._errors import one_of
from jaxkfac.blocks import (
    DiagonalFactor,
    EigenBlock,
    Factors,
    KroneckerFactor,
    Place,
    Side,
    check_all_layers,
    layout_of,
    over_stack,
)
from jaxkfac.curvature._apply import is_small, map_in_batches
from jaxkfac.curvature._eigenbases import Eigenbases, KroneckerEigenbasis, check_bases
from jaxkfac.curvature._placement import (
    DenseMean,
    MeshAxis,
    Placement,
    device_of,
    is_on_host,
    matrices_that_fit,
    solve_divided,
    solve_on_host,
)
from jaxkfac.linalg.spectral import (
    Spectrum,
    check_clipping,
    eigh_checked,
    eigh_in_turn,
    from_spectrum,
    host_dtype,
)
from jaxkfac.memory import whole_here

# ---------------- from factors to eigenbases


def eigendecompose(
    factors: Factors,
    *,
    max_condition: float = 1e6,
    floor: float = 0.0,
    placement: Placement = "auto",
    vectors: bool = True,
    dtype: DTypeLike = "float64",
    distribute: str | MeshAxis | None = None,
) -> Eigenbases:
    r"""Eigendecompose every factor of a model, each distinct factor once.

    Layers that read the same input share one decomposition of A. If some of them have a joint bias
    and others have none, the A without its ones row and column is decomposed too, because its
    eigenvectors differ.

    On an accelerator there is one batched call for each distinct size, over stacks and
    layers. The CPU decomposes one matrix at a time whatever the batch; there, and on the host,
    one call is made for each factor, so that the peak memory is that of one layer.

    The host decomposes in float64 and rounds the results to the factors' dtype: the error of
    a float32 decomposition is divided by the smallest eigenvalues. A device decomposes in the
    factors' dtype.

    Args:
        factors: Sums and counts; their means are decomposed.
        max_condition: $\kappa \ge 1$: smaller values are read as $\lambda_{\max}/\kappa$.
        floor: Smaller values are read as this, in the factor's own units.
        placement: ``"device"``: where the factors live. ``"host"``: in host memory; the results
            return to where the factors live. ``"auto"``: ``"device"`` inside a trace and
            ``"host"`` on the CPU. On an accelerator, ``"auto"`` decomposes on the device in batches
            whose workspace of ``3 n**2`` elements fits in half of the free memory, and on the host
            if a single matrix does not fit. No factor is left out.
        vectors: ``False`` keeps only the values, for spectra and capacity. The values are equal
            bit by bit, and the work is the same.
        dtype: The dtype in which the host decomposes, ``"float64"`` or ``"float32"``. Factors in
            float64 are always decomposed in float64.
        distribute: A mesh axis whose devices share the matrices, divided by the cubes of their
            sizes: each matrix is decomposed by one device, and every device has all results. The
            mesh is that of ``jax.set_mesh`` or of the factors. Not with ``"host"``, where several
            processes always divide the work.

    Returns:
        The bases, in the factors' dtype. Raw values are stored; they are clipped when they are
        read.

    Raises:
        ValueError: ``max_condition < 1``, ``floor < 0``, an unknown ``placement`` or ``dtype``,
            or ``"host"`` inside a trace; ``distribute`` names no axis of a known mesh.
        TypeError: ``factors`` is not :class:`Factors`, but for example a gradient.
        NonFiniteFactorError: naming the layer; outside a trace with ``"auto"`` and ``"host"``,
            after a retry on the host. Inside a trace and with ``"device"`` nothing raises: the
            values of that factor are NaN, and ``bases.is_finite()`` reports it.

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
    one_of("placement", placement, get_args(Placement))
    on_host = functools.partial(solve_on_host, vectors=vectors, dtype=host_dtype(dtype))
    check_all_layers("eigendecompose", factors.turn)
    layout = layout_of(factors.layers, factors.bias)
    sides: list[DenseMean] = []
    spectra: dict[Place, Any] = {}
    for place, block in layout.blocks.items():
        mean = block_mean(factors, block)
        if block.source.dense:
            sides.append(DenseMean(block, mean))
        elif place.table == "diagonals":
            spectra[place] = jnp.asarray(mean)
        else:
            spectra[place] = Spectrum(jnp.asarray(mean), None)
    if placement == "host" and any(isinstance(side.matrix, Tracer) for side in sides):
        raise ValueError(
            "placement='host' needs concrete factors, and these are traced; inside jit use "
            "'auto' or 'device', or call eigendecompose outside"
        )
    MeshAxis.check(distribute)
    if distribute is None:
        solved = _decompose(sides, placement, vectors, on_host)
    elif placement == "host":
        raise ValueError("distribute divides what devices decompose: not with placement='host'")
    else:
        if isinstance(distribute, str):
            distribute = MeshAxis.of(distribute, factors)
        matrices = [(jnp.asarray(side.matrix),) for side in sides]
        eigh = functools.partial(eigh_checked, vectors=vectors)
        solved = zip(sides, solve_divided(matrices, eigh, distribute), strict=True)
    for side, spectrum in solved:
        spectra[side.block.place] = spectrum
    clipping = {"max_condition": max_condition, "floor": floor}
    return Eigenbases.of_blocks(layout, spectra, **clipping, origin=factors.origin)


def block_mean(factors: Factors, block: EigenBlock) -> Array | np.ndarray:
    """The matrix or diagonal that is decomposed for a block; NumPy in, NumPy out.

    A matrix of packed factors is unfolded.
    """
    return block.mean(lambda entry: factors.side(entry.place).mean)


def block_sums(factors: Factors, block: EigenBlock) -> Side:
    """A side with the mean of ``block_mean``, for a reader that unfolds a matrix itself.

    A block that is made of several entries is a mean already.
    """
    # A block of two readings has entries with different counts, so no single divisor belongs to it.
    # The ones are cut off a full matrix, because a folded one has no last row.
    if block.both is not None or block.without_ones:
        mean = jnp.asarray(block_mean(factors, block))
        return Side(mean, jnp.ones((), mean.dtype), block.source.dense)
    side = factors.side(block.source.place)
    sums, count = jnp.asarray(side.data), jnp.asarray(side.count)
    # A factor without rows stays zero instead of NaN.
    return Side(sums, jnp.where(count > 0, count, 1).astype(sums.dtype), side.is_matrix)


def over(sums: Array, divisor: Array) -> Array:
    """Means, from the data and the count of ``block_sums``."""
    return sums / over_stack(divisor, sums)


def _decompose(
    sides: list[DenseMean],
    placement: Placement,
    vectors: bool,
    on_host: Callable[[list[DenseMean]], list[Spectrum]],
) -> list[tuple[DenseMean, Spectrum]]:
    if placement == "host":
        return list(zip(sides, on_host(sides), strict=True))
    groups: dict[Any, list[DenseMean]] = defaultdict(list)
    results: list[tuple[DenseMean, Spectrum]] = []
    left_to_host: list[DenseMean] = []
    for side in sides:
        matrix = side.matrix
        is_array = not isinstance(matrix, np.ndarray | Tracer)
        # NumPy arrays come from a byte budget, and offloaded ones too were too many for the device.
        in_host_memory = isinstance(matrix, np.ndarray) or (is_array and is_on_host(matrix))
        if in_host_memory and placement == "auto":
            left_to_host.append(side)
            continue
        where = frozenset(matrix.sharding.device_set) if is_array else frozenset()
        # Arrays of different devices cannot be one batch.
        groups[matrix.shape[-1], matrix.dtype, where].append(side)
    for (n, dtype, _), members in groups.items():
        # All members of a group live on the same devices, so one of them answers for all.
        first: Any = members[0].matrix
        checked = placement == "auto" and not isinstance(first, Tracer)
        limit = matrices_that_fit(n, dtype, first) if checked else None
        is_host = limit is None and checked and device_of(first.sharding).platform == "cpu"
        if checked and (limit == 0 or is_host):
            left_to_host += members
            continue
        # Independent decompositions of one program would run at once (``in_sequence``).
        after = results[-1][1].values if results and isinstance(first, Tracer) else None
        spectra = _of_one_size(
            [jnp.asarray(side.matrix) for side in members], limit, vectors, after
        )
        for side, spectrum in zip(members, spectra, strict=True):
            # LAPACK in float64 may converge where a device's solver does not, so the host has a
            # second try.
            if checked and not np.isfinite(np.asarray(whole_here(spectrum.values))).all():
                left_to_host.append(side)
            else:
                results.append((side, spectrum))
    return [*results, *zip(left_to_host, on_host(left_to_host), strict=True)]


def _of_one_size(
    matrices: list[Array], limit: int | None, vectors: bool, after: Array | None
) -> list[Spectrum]:
    """Decompose in turn on the CPU; elsewhere in one call, or in batches of ``limit``."""
    in_turn = functools.partial(eigh_in_turn, vectors=vectors, after=after)
    batched = functools.partial(_batched, limit=limit, vectors=vectors)
    if limit is not None:
        return batched(matrices)
    if not isinstance(matrices[0], Tracer):
        return (in_turn if device_of(matrices[0].sharding).platform == "cpu" else batched)(matrices)
    # Inside a trace the platform is not known yet.
    return jax.lax.platform_dependent(matrices, cpu=in_turn, default=batched)


def _batched(matrices: list[Array], *, limit: int | None, vectors: bool) -> list[Spectrum]:
    n = matrices[0].shape[-1]
    rows = [matrix.reshape(-1, n, n) for matrix in matrices]
    batch = jnp.concatenate(rows) if len(rows) > 1 else rows[0]
    step = max(limit or len(batch), 1)
    spectra = [
        eigh_checked(batch[i : i + step], vectors=vectors) for i in range(0, len(batch), step)
    ]
    values = jnp.concatenate([spectrum.values for spectrum in spectra])
    columns = [spectrum.vectors for spectrum in spectra if spectrum.vectors is not None]
    columns = jnp.concatenate(columns) if vectors else None
    results, start = [], 0
    for matrix, matrix_rows in zip(matrices, rows, strict=True):
        stop = start + len(matrix_rows)
        own_columns = None if columns is None else columns[start:stop].reshape(matrix.shape)
        results.append(Spectrum(values[start:stop].reshape(matrix.shape[:-1]), own_columns))
        start = stop
    return results


# ---------------- from eigenbases to factors


def reconstruct(bases: Eigenbases) -> dict[str, KroneckerFactor | DiagonalFactor]:
    r"""Rebuild the factors from clipped eigenvalues, $Q \operatorname{diag}(\lambda) Q^\top$.

    Args:
        bases: From :func:`eigendecompose`.

    Returns:
        ``{layer name: KroneckerFactor(a, g)}``, or ``DiagonalFactor(diagonal)``, which read like
        :class:`Factors`: means, with diagonal sides as vectors. With ``max_condition=inf`` these
        are the factors that were decomposed, to rounding. Layers that share an input share the
        rebuilt A. Small sides of equal size are rebuilt in one batched product.

    Raises:
        ValueError: the bases hold no eigenvectors; or they are corrected
            (:func:`correct_eigenvalues`), and measured eigenvalues belong to no two factors.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> clipped = jk.reconstruct(jk.eigendecompose(factors, max_condition=4.0))
        >>> print(jnp.linalg.cond(clipped["kernel"].g).round(2))
        4.0
    """
    check_bases(bases)
    if bases.corrections is not None:
        raise ValueError(
            "these bases hold measured eigenvalues, which are no products of two factors' "
            "eigenvalues: reconstruct the bases that were given to correct_eigenvalues, or "
            "apply the measured curvature with apply_power"
        )
    sides: dict[Place, tuple[None, Spectrum]] = {}
    places: dict[str, tuple[Place, Place]] = {}
    for layer in bases.layers:
        if layer.is_diagonal:
            continue
        basis = bases.basis(layer)
        assert isinstance(basis, KroneckerEigenbasis)
        table = "a" if bases.wants_ones(layer) else "a_without_ones"
        a, g = Place(table, layer.input), Place("g", layer.name)
        places[layer.name] = a, g
        _check(basis.a_vectors, layer.name, dense=layer.a_dense)
        _check(basis.g_vectors, layer.name, dense=layer.g_dense)
        # Eigenvectors may be in host memory.
        sides[a] = None, jax.tree.map(jnp.asarray, Spectrum(basis.a_values, basis.a_vectors))
        sides[g] = None, jax.tree.map(jnp.asarray, Spectrum(basis.g_values, basis.g_vectors))
    small = {
        place: side
        for place, side in sides.items()
        if side[1].values.ndim == 1 and is_small(side[1].values.shape[-1])
    }
    matrices = map_in_batches(lambda _, side: _side(side), small)
    matrices |= {place: _side(side) for place, (_, side) in sides.items() if place not in small}
    return {
        layer.name: DiagonalFactor(bases.diagonal_basis(layer).diagonal)
        if layer.is_diagonal
        else KroneckerFactor(*(matrices[place] for place in places[layer.name]))
        for layer in bases.layers
    }


def _side(side: Spectrum) -> Array:
    values, vectors = side
    return values if vectors is None else from_spectrum(values, vectors)


def _check(vectors: Array | np.ndarray | None, name: str, *, dense: bool) -> None:
    if dense and vectors is None:
        raise ValueError(
            f"the bases hold no eigenvectors of layer {name!r}; decompose with vectors=True"
        )
