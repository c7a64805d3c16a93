"""Eigenvalues of every block of a model, their sums, and order statistics of their products."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._errors import NonFiniteFactorError
from jaxkfac.curvature._eigenbases import DiagonalEigenbasis, Eigenbases, KroneckerEigenbasis
from jaxkfac.curvature._layer_power import owners
from jaxkfac.interception import Layer

# ---------------- eigenvalues by block


_ONE = np.ones(1)


class CapacityBlock(NamedTuple):
    r"""All products $\alpha_i \gamma_j$ of two lists of eigenvalues, never formed.

    If eigenvalues are not products (a diagonal, or values measured one by one), the first list is
    ``[1.0]`` and the second holds all values.

    Attributes:
        rows: The shorter list, float64, ascending, not negative.
        columns: The longer list, float64, ascending, not negative.
        clipped: The smallest and the largest product after clipping.
        rounding: Largest values of rows and columns that may be rounding errors of zeros.
    """

    rows: np.ndarray
    columns: np.ndarray
    clipped: tuple[float, float]
    rounding: tuple[float, float] = (0.0, 0.0)

    @property
    def size(self) -> int:
        """Number of eigenvalues."""
        return len(self.rows) * len(self.columns)


class Slice(NamedTuple):
    """One stacked slice of a layer, or a layer without a stack.

    Attributes:
        weight: The block of the weight, with its joint bias.
        bias: The block of a separate bias (``bias="separate"``).
        a: Eigenvalues of the factor A; ``None`` for a diagonal.
        g: G as a block; ``None`` for a diagonal.
    """

    weight: CapacityBlock
    bias: CapacityBlock | None = None
    a: np.ndarray | None = None
    g: CapacityBlock | None = None

    @property
    def blocks(self) -> list[CapacityBlock]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class LayerBlocks(NamedTuple):
    """The blocks of a layer.

    Attributes:
        name: Name of the layer.
        slices: One for each stacked slice, in the order of the stack.
        stacked: Whether the layer has a stack.
        counted: The blocks that count in the full model: those of parameters that no other layer
            owns.
    """

    name: str
    slices: tuple[Slice, ...]
    stacked: bool
    counted: tuple[CapacityBlock, ...]


def layer_blocks(bases: Eigenbases) -> list[LayerBlocks]:
    """The blocks of every layer, on the host in float64.

    Raises:
        ValueError: the bases are traced.
        NonFiniteFactorError: naming the layer whose eigenvalues are not finite.
    """
    owned = {owner.layer.name: owner for owner in owners(bases.layers)}
    all_blocks = []
    for layer in bases.layers:
        slices = tuple(_slices(bases, layer))
        owner = owned.get(layer.name)
        if owner is not None and owner.writes_weight:
            own_bias = owner.writes_bias
            counted = [b for s in slices for b in (s.blocks if own_bias else [s.weight])]
        elif owner is not None:  # another layer owns the weight; the block of the bias is G
            blocks = [s.g if s.bias is None else s.bias for s in slices]
            counted = [block for block in blocks if block is not None]
        else:
            counted = []
        all_blocks.append(LayerBlocks(layer.name, slices, bool(layer.stack), tuple(counted)))
    return all_blocks


def _slices(bases: Eigenbases, layer: Layer) -> list[Slice]:
    basis = bases.basis(layer)
    if isinstance(basis, DiagonalEigenbasis):
        raw, clipped = (diagonal_rows(layer, x) for x in (basis.raw_diagonal, basis.diagonal))
        return [Slice(block) for block in _listed(raw, clipped, layer, rounding=0.0)]
    a = _on_host(basis.a_raw_values, layer)
    rounding = _rounding(basis.g_raw_values, layer.g_dense)
    g_blocks = _listed(basis.g_raw_values, basis.g_values, layer, rounding=rounding)
    weights, biases = _weights(basis, layer), [None] * len(g_blocks)
    if basis.bias_raw_values is not None and basis.bias_values is not None:
        biases = _listed(basis.bias_raw_values, basis.bias_values, layer, rounding=0.0)
    elif bases.bias == "separate" and layer.bias is not None:
        # A bias with a block of its own has the curvature G, until it is measured.
        biases = g_blocks
    a_rows = a.reshape(len(g_blocks), a.shape[-1])
    return [Slice(*fields) for fields in zip(weights, biases, a_rows, g_blocks, strict=True)]


def _weights(basis: KroneckerEigenbasis, layer: Layer) -> list[CapacityBlock]:
    if basis.raw_values is not None and basis.values is not None:  # measured one by one
        raw, clipped = (x.reshape(*x.shape[:-2], -1) for x in (basis.raw_values, basis.values))
        return _listed(raw, clipped, layer, rounding=0.0)
    raw_a, raw_g, clipped_a, clipped_g = (
        _on_host(x, layer)
        for x in (basis.a_raw_values, basis.g_raw_values, basis.a_values, basis.g_values)
    )
    indices = np.ndindex(raw_a.shape[:-1])
    rounding = (
        _rounding(basis.a_raw_values, layer.a_dense),
        _rounding(basis.g_raw_values, layer.g_dense),
    )
    return [_block(raw_a[i], raw_g[i], (clipped_a[i], clipped_g[i]), rounding) for i in indices]


def _listed(
    raw: Array | np.ndarray, clipped: Array | np.ndarray, layer: Layer, *, rounding: float
) -> list[CapacityBlock]:
    """One block for each slice of eigenvalues ``(stack..., n)`` that are not products."""
    raw, clipped = _on_host(raw, layer), _on_host(clipped, layer)
    indices = np.ndindex(raw.shape[:-1])
    return [_block(_ONE, raw[i], (_ONE, clipped[i]), (0.0, rounding)) for i in indices]


def _rounding(values: Array | np.ndarray, dense: bool) -> float:
    r"""$n \varepsilon$ for a decomposed matrix, $\varepsilon$ of its own dtype; 0 for a diagonal.

    The factor was rounded in its dtype when it was summed, so a zero eigenvalue may read as up to
    about $n \varepsilon \lambda_{\max}$, whatever the precision of the decomposition. Diagonals and
    measured eigenvalues are sums of squares, correct to their last digits.
    """
    return values.shape[-1] * float(np.finfo(values.dtype).eps) if dense else 0.0


def _block(
    a: np.ndarray,
    g: np.ndarray,
    clipped: tuple[np.ndarray, np.ndarray],
    rounding: tuple[float, float],
) -> CapacityBlock:
    # Rounding may leave a positive semi-definite matrix with negative eigenvalues; they count as 0.
    sides = [(np.sort(np.maximum(x, 0)), share) for x, share in zip((a, g), rounding, strict=True)]
    # The shorter side as rows: order statistics take one bisection for each row.
    (rows, of_rows), (columns, of_columns) = sorted(sides, key=lambda side: len(side[0]))
    # The extremes of all products are products of the extremes, because no eigenvalue is negative.
    low, high = (math.prod(max(float(end(x)), 0.0) for x in clipped) for end in (np.min, np.max))
    errors = float(of_rows * rows[-1]), float(of_columns * columns[-1])
    return CapacityBlock(rows, columns, (low, high), errors)


def diagonal_rows(layer: Layer, diagonal: Array) -> Any:
    """``(stack..., elements)`` from a diagonal shaped like the parameter or like its slice."""
    weight = dataclasses.replace(layer.weight, index=())
    if diagonal.size != weight.size:
        weight = layer.weight
    matrix = weight.read(diagonal)
    return matrix.reshape(*matrix.shape[:-2], -1)


def _on_host(values: Array | np.ndarray, layer: Layer) -> np.ndarray:
    if isinstance(values, Tracer):
        raise ValueError(
            "capacity_metrics measures on the host and these bases are traced; return the bases "
            "from jit and call it outside"
        )
    array = np.asarray(values).astype(np.float64)
    if not np.isfinite(array).all():
        raise NonFiniteFactorError(
            f"the eigenvalues of layer {layer.name!r} are not finite: "
            f"{int((~np.isfinite(array)).sum())} of {array.size}; decompose with placement='host' "
            "to retry in float64, or look for NaN in the batch"
        )
    return array


# ---------------- order statistics of products that are never formed


_FEW = 2**14  # candidates that are cheaper to write out than to narrow down


def count_above(block: CapacityBlock, threshold: float) -> int:
    r"""How many $\alpha_i \gamma_j$ exceed ``threshold``, in O(m + n) memory.

    Rounding is monotone, so in each row the float64 products that exceed the threshold are the last
    ones. One bisection serves all rows.
    """
    rows = _Rows([block])
    return block.size - int(rows.at_most(threshold, rows.first, rows.last).sum())


def quantiles(blocks: Sequence[CapacityBlock], fractions: Sequence[float]) -> dict[float, float]:
    """For each fraction q, the smallest eigenvalue such that at least q of all do not exceed it.

    This is ``numpy.quantile(..., method="inverted_cdf")``, which always returns an eigenvalue.
    O(sum of m + n) memory.
    """
    rows, size = _Rows(blocks), sum(block.size for block in blocks)
    # Via the decimal text, so that 0.07 of 100 is exactly the seventh.
    ranks = {q: max(math.ceil(Fraction(repr(q)) * size), 1) for q in map(float, fractions)}
    return {q: rows.kth_smallest(rank) for q, rank in ranks.items()}


class _Rows:
    """The rows of several outer products, each ascending, as indices into one flat list."""

    def __init__(self, blocks: Sequence[CapacityBlock]) -> None:
        lengths = [len(block.columns) for block in blocks]
        counts = [len(block.rows) for block in blocks]
        starts = np.cumsum([0, *lengths[:-1]])
        self.factors = np.concatenate([block.rows for block in blocks])
        self.columns = np.concatenate([block.columns for block in blocks])
        self.first = np.repeat(starts, counts)
        self.last = self.first + np.repeat(lengths, counts)
        self.largest = max(float(block.rows[-1] * block.columns[-1]) for block in blocks)

    def at_most(self, value: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """In each row the first position in [low, high] whose product exceeds ``value``."""
        low, high = low.copy(), high.copy()
        while len(rows := np.flatnonzero(low < high)):
            # All rows in one NumPy operation, because a layer has thousands of them.
            middle = (low[rows] + high[rows]) // 2
            below = self.factors[rows] * self.columns[middle] <= value
            low[rows[below]] = middle[below] + 1
            high[rows[~below]] = middle[~below]
        return low

    def kth_smallest(self, k: int) -> float:
        """Bisect over the bit patterns of float64, which are ordered like the numbers.

        In each row only the positions between the two bounds remain candidates, until few remain
        or the bounds are neighbors, when all candidates are equal.
        """
        # Bits and not values: halving the interval of bits ends after 64 steps, however small the
        # smallest eigenvalue is. The lower bound is excluded, so -1 leaves 0 to be found.
        lower, upper = -1, int(np.float64(self.largest).view(np.int64))
        low, high = self.first, self.last
        below = 0  # how many do not exceed the lower bound
        while upper - lower > 1 and int((high - low).sum()) > _FEW:
            middle = (lower + upper) // 2
            reached = self.at_most(float(np.int64(middle).view(np.float64)), low, high)
            count = below + int((reached - low).sum())
            if count >= k:
                upper, high = middle, reached
            else:
                lower, low, below = middle, reached, count
        if upper - lower == 1:
            return float(np.int64(upper).view(np.float64))
        widths = high - low
        ends = np.cumsum(widths)
        positions = np.arange(ends[-1]) + np.repeat(low - (ends - widths), widths)
        candidates = np.repeat(self.factors, widths) * self.columns[positions]
        return float(np.partition(candidates, k - below - 1)[k - below - 1])


# ---------------- sums over eigenvalues


_ELEMENTS = 2**16  # products alive at once: they fit in a core's cache


class Settings(NamedTuple):
    """The arguments of ``capacity_metrics``."""

    num_examples: float
    damping: float
    threshold: float
    powers: tuple[float, ...]
    quantiles: tuple[float, ...]


class Sums(NamedTuple):
    r"""Sums over the eigenvalues of one block, or of a block-diagonal matrix of several.

    Attributes:
        size: Number of eigenvalues.
        trace: $\sum \lambda$.
        squares: $\sum \lambda^2$.
        entropy: Entropy of $p = \lambda / \sum \lambda$, in nats.
        powers: $\sum \lambda^p$ for each requested p.
        log_positive: $\sum \ln \lambda$ over the positive ones.
        positive: Number of positive eigenvalues, above the rounding of their factors.
        above: Number of eigenvalues above the threshold.
        smallest: Smallest eigenvalue.
        largest: Largest eigenvalue.
        smallest_clipped: Smallest eigenvalue after clipping.
        largest_clipped: Largest eigenvalue after clipping.
        effective: $\sum N\lambda / (N\lambda + \delta)$.
        log_damped: $\sum \ln(N\lambda + \delta)$; $-\infty$ if a term is.
    """

    size: int
    trace: float
    squares: float
    entropy: float
    powers: tuple[float, ...]
    log_positive: float
    positive: int
    above: int
    smallest: float
    largest: float
    smallest_clipped: float
    largest_clipped: float
    effective: float
    log_damped: float


def sums_of(block: CapacityBlock, settings: Settings) -> Sums:
    """All sums of a block, in O(m + n) memory."""
    a, g = (x[x > 0] for x in (block.rows, block.columns))
    sides = zip((block.rows, block.columns), block.rounding, strict=True)
    sure_a, sure_g = (x[x > rounding] for x, rounding in sides)
    n, delta = settings.num_examples, settings.damping
    zeros = block.size - len(a) * len(g)
    scaled = lambda x: n * x + delta
    positive = len(sure_a) * len(sure_g)
    # Without damping Nλ / (Nλ + δ) is 1 for every eigenvalue above the rounding of zero.
    effective = _streamed(a, g, lambda x: n * x / scaled(x)) if delta else positive
    log_damped = _streamed(a, g, lambda x: np.log(scaled(x)))
    if zeros:
        log_damped += zeros * math.log(delta) if delta else -math.inf
    return Sums(
        size=block.size,
        trace=float(a.sum() * g.sum()),
        squares=float((a**2).sum() * (g**2).sum()),
        entropy=_entropy(a) + _entropy(g) if len(a) and len(g) else 0.0,
        powers=tuple(float((a**p).sum() * (g**p).sum()) for p in settings.powers),
        log_positive=float(len(sure_g) * np.log(sure_a).sum() + len(sure_a) * np.log(sure_g).sum()),
        positive=positive,
        above=count_above(block, settings.threshold),
        smallest=float(block.rows[0] * block.columns[0]),
        largest=float(block.rows[-1] * block.columns[-1]),
        smallest_clipped=block.clipped[0],
        largest_clipped=block.clipped[1],
        effective=float(effective),
        log_damped=log_damped,
    )


def combined(sums: Sequence[Sums]) -> Sums:
    r"""The sums over the eigenvalues of all blocks together.

    Entropies combine by the blocks' shares of the trace, $w = T / \sum T$, as
    $H(w) + \sum w H$.
    """
    trace = math.fsum(x.trace for x in sums)
    shares = [(x.trace / trace, x.entropy) for x in sums if x.trace > 0]
    return Sums(
        size=sum(x.size for x in sums),
        trace=trace,
        squares=math.fsum(x.squares for x in sums),
        entropy=math.fsum(w * (entropy - math.log(w)) for w, entropy in shares),
        powers=tuple(map(math.fsum, zip(*(x.powers for x in sums), strict=True))),
        log_positive=math.fsum(x.log_positive for x in sums),
        positive=sum(x.positive for x in sums),
        above=sum(x.above for x in sums),
        smallest=min(x.smallest for x in sums),
        largest=max(x.largest for x in sums),
        smallest_clipped=min(x.smallest_clipped for x in sums),
        largest_clipped=max(x.largest_clipped for x in sums),
        effective=math.fsum(x.effective for x in sums),
        log_damped=math.fsum(x.log_damped for x in sums),
    )


def sum_log1p(blocks: Sequence[CapacityBlock], scale: float) -> float:
    r"""$\sum \ln(1 + s \lambda)$ over all blocks, in O(m + n) memory."""
    return math.fsum(
        _streamed(block.rows, block.columns, lambda x: np.log1p(scale * x)) for block in blocks
    )


def _entropy(values: np.ndarray) -> float:
    p = values / values.sum()
    return float(-(p * np.log(p)).sum())


def _streamed(a: np.ndarray, g: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> float:
    """The sum of ``function`` over all products, a few rows at a time."""
    return math.fsum(float(function(products).sum()) for products in _products(a, g))


def _products(a: np.ndarray, g: np.ndarray) -> Iterator[np.ndarray]:
    width = max(min(len(g), _ELEMENTS), 1)
    height = _ELEMENTS // width
    for j in range(0, len(g), width):
        for i in range(0, len(a), height):
            yield np.multiply.outer(a[i : i + height], g[j : j + width])
