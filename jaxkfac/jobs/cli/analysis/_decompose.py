"""Eigenvalues of factors on disk, by decomposition, and Lanczos with its vectors on disk."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError, nearest
from jaxkfac.blocks import Factors, Place, Side, Sides
from jaxkfac.interception import Layer
from jaxkfac.jobs.cli.analysis._files import Folder, Group
from jaxkfac.linalg.spectral import Spectrum

# ---------------- Lanczos with vectors on disk: only two of them are in memory at a time


_CHUNK = 1 << 16
_EPS = float(np.finfo(np.float32).eps)  # the vectors are float32
_STATE = "lanczos/state.json"


class ExactSpectrum(NamedTuple):
    """The largest eigenvalues of the exact Fisher.

    Attributes:
        eigenvalues: Descending.
        error_bounds: Each eigenvalue lies within this distance of an exact one.
        steps: Number of products made.
    """

    eigenvalues: list[float]
    error_bounds: list[float]
    steps: int


def lanczos(
    product: Callable[[np.ndarray], np.ndarray],
    size: int,
    folder: Folder,
    *,
    count: int,
    steps: int,
    seed: int,
    eps: float,
    advance: Callable[[int, str], None],
) -> ExactSpectrum:
    r"""Lanczos with full reorthogonalization; a resumed run makes only the missing products.

    After $k$ steps $A Q = Q T + \beta q e_k^\top$: for an eigenpair $T s = \theta s$ an eigenvalue
    of $A$ lies within $\beta |s_k|$ of $\theta$. See :func:`jaxkfac.spectrum`, which keeps the
    vectors on the device.

    Args:
        product: Product of the operator with a flat float32 vector.
        size: Length of the vectors.
        folder: Folder for the vectors.
        count: Largest number of eigenvalues to return.
        steps: Largest number of products.
        seed: Seed for the first vector.
        eps: Relative precision of the dtype in which products are computed.
        advance: Called with the number of products made.

    Raises:
        NonFiniteFactorError: a product is not finite.

    Memory:
        Two vectors in addition to what the product needs.
    """
    state = {"alphas": [], "betas": []}
    if folder.has(_STATE):
        state = folder.read(_STATE)
    else:
        first = np.random.Generator(np.random.Philox(seed)).standard_normal(size, np.float32)
        first /= np.float32(np.sqrt(_dot(first, first)))
        folder.save_vector(0, first)
        folder.write(_STATE, state)
        del first
    alphas, betas = state["alphas"], state["betas"]
    while len(alphas) < min(steps, size) and not _is_exhausted(alphas, betas, eps):
        done = len(alphas)
        residual = product(folder.load_vector(done))
        if not np.isfinite(_dot(residual, residual)):
            raise NonFiniteFactorError(
                f"product {done + 1} of Lanczos with the exact Fisher is not finite: the model "
                "overflows on the first texts"
            )
        alpha = 0.0
        for again in (False, True):  # the second pass removes what rounding left of the first
            for number in range(done, -1, -1):
                vector = folder.load_vector(number)
                along = _dot(vector, residual)
                vector *= np.float32(along)
                residual -= vector
                if number == done and not again:
                    alpha = along
        beta = float(np.sqrt(_dot(residual, residual)))
        if beta > 0:
            residual /= np.float32(beta)
        folder.save_vector(done + 1, residual)
        alphas, betas = [*alphas, alpha], [*betas, beta]
        folder.write(_STATE, {"alphas": alphas, "betas": betas})
        del residual
        advance(len(alphas), f"largest {_ritz(alphas, betas, eps)[0][0]:.4g}")
    values, bounds = _ritz(alphas, betas, eps)
    return ExactSpectrum(values[:count], bounds[:count], len(alphas))


def _ritz(alphas: list[float], betas: list[float], eps: float) -> tuple[list[float], list[float]]:
    matrix = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    values, vectors = np.linalg.eigh(matrix)
    rounding = 10 * len(alphas) * max(eps, _EPS) * float(np.abs(values).max())
    bounds = betas[-1] * np.abs(vectors[-1]) + rounding
    return values[::-1].tolist(), bounds[::-1].tolist()


def _is_exhausted(alphas: list[float], betas: list[float], eps: float) -> bool:
    """Whether only rounding error is left of the Krylov space."""
    if not betas:
        return False
    # Sums in float32 lose more than one rounding step; a product's rounding is about one at most.
    return betas[-1] <= max(16 * _EPS, eps) * max(map(abs, alphas))


def _dot(first: np.ndarray, second: np.ndarray) -> float:
    """Dot product in float64 over chunks; one float32 sum of 1e8 terms would lose digits."""
    return sum(
        float(np.dot(first[at : at + _CHUNK], second[at : at + _CHUNK]))
        for at in range(0, len(first), _CHUNK)
    )


# ---------------- eigenvalues of factors on disk, one block of one group at a time


class Chosen:
    """The blocks to decompose.

    Args:
        groups: All layers.
        pattern: Full-match pattern of a layer's name, or of the name of one of its blocks.

    Raises:
        UnknownLayerError: the pattern matches nothing.
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
        return [block for owner, block in self.blocks if owner is group]

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
    """Write the eigenvalues of every chosen block; existing ones stay.

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
    values = {place: side.data for place, side in bases.sides.items()}
    return {
        f"{table}|{key}": np.asarray(x.values if isinstance(x, Spectrum) else x)
        for (table, key), x in values.items()
    }


def _factors(group: Group, block: int | None, layers: tuple[Layer, ...], folder: Folder) -> Factors:
    sides: Sides = {}
    terms = 0.0
    suffix = "" if block is None else f"[{block}]"
    for part in group.parts(block):
        stored = folder.load_part(part)
        terms = stored.terms
        place = Place(part.table, part.key + suffix)
        sides[place] = Side(stored.in_full(part), stored.counts.get(part))
    terms = np.asarray(terms, np.float32)
    return Factors.of_sides(sides, terms=terms, layers=layers, bias="joint")


def eigenbases(chosen: Chosen, folder: Folder, *, max_condition: float) -> jk.Eigenbases:
    """Bases, without eigenvectors, of what has been decomposed.

    A stacked layer with all blocks decomposed stays one layer; otherwise each block is a layer.
    """
    sides: Sides = {}
    layers: list[Layer] = []
    for group in chosen.groups:
        if not (blocks := chosen.of(group)):
            continue
        stacked = chosen.is_whole(group) and blocks[0] is not None
        block_values = [(block, folder.load_values(group.name(block))) for block in blocks]
        if stacked:
            layers += group.layers
        for block, values in block_values:
            if not stacked:
                layers += group.of_block(block)
            for place, array in _entries(values):
                if place.table == "diagonals":
                    sides[place] = Side(jnp.asarray(array))
                elif not stacked:
                    sides[place] = Side(Spectrum(jnp.asarray(array), None))
        if stacked:
            for (table, key), _ in _entries(block_values[0][1]):
                base = key.removesuffix(f"[{blocks[0]}]")
                rows = [values[f"{table}|{base}[{block}]"] for block, values in block_values]
                sides[Place(table, base)] = Side(Spectrum(jnp.asarray(np.stack(rows)), None))
    form = tuple(layers), "joint", max_condition, 0.0
    return jk.Eigenbases({}, {}, {}, {}, *form).with_sides(sides)


def _entries(values: dict[str, np.ndarray]) -> Iterator[tuple[Place, np.ndarray]]:
    for name, array in values.items():
        table, _, key = name.partition("|")
        yield Place(table, key), array
