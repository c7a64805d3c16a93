"""What adds up over blocks: each quantity of a block, and of several together."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxkfac.curvature.capacity._blocks import CapacityBlock
from jaxkfac.curvature.capacity._order import count_above

_ELEMENTS = 2**16  # products alive at once: they fit in a core's cache


class Settings(NamedTuple):
    """What the metrics are measured with; see ``capacity_metrics``."""

    num_examples: float
    damping: float
    threshold: float
    powers: tuple[float, ...]
    quantiles: tuple[float, ...]


class Sums(NamedTuple):
    r"""Of one block, or of several side by side: a block-diagonal matrix.

    Attributes:
        size: Number of eigenvalues.
        trace: $\sum \lambda$.
        squares: $\sum \lambda^2$.
        entropy: Of $p = \lambda / \sum \lambda$, nats.
        powers: $\sum \lambda^p$ for each asked p.
        log_positive: $\sum \ln \lambda$ over the positive ones.
        positive: How many are positive: more than rounding, of their factors.
        above: How many exceed the threshold.
        smallest: Smallest eigenvalue.
        largest: Largest eigenvalue.
        smallest_clipped: Likewise after clipping.
        largest_clipped: Likewise after clipping.
        effective: $\sum N\lambda / (N\lambda + \delta)$.
        log_damped: $\sum \ln(N\lambda + \delta)$; $-\infty$ where a term is.
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
    # Without damping every eigenvalue that is no rounding error of zero counts as one.
    positive = len(sure_a) * len(sure_g)
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


def combined(parts: Sequence[Sums]) -> Sums:
    r"""The sums of all blocks together.

    Entropies combine with the blocks' shares of the trace, $w = T / \sum T$, as
    $H(w) + \sum w H$.
    """
    trace = math.fsum(part.trace for part in parts)
    shares = [(part.trace / trace, part.entropy) for part in parts if part.trace > 0]
    return Sums(
        size=sum(part.size for part in parts),
        trace=trace,
        squares=math.fsum(part.squares for part in parts),
        entropy=math.fsum(w * (entropy - math.log(w)) for w, entropy in shares),
        powers=tuple(map(math.fsum, zip(*(part.powers for part in parts), strict=True))),
        log_positive=math.fsum(part.log_positive for part in parts),
        positive=sum(part.positive for part in parts),
        above=sum(part.above for part in parts),
        smallest=min(part.smallest for part in parts),
        largest=max(part.largest for part in parts),
        smallest_clipped=min(part.smallest_clipped for part in parts),
        largest_clipped=max(part.largest_clipped for part in parts),
        effective=math.fsum(part.effective for part in parts),
        log_damped=math.fsum(part.log_damped for part in parts),
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
    return math.fsum(float(function(part).sum()) for part in _products(a, g))


def _products(a: np.ndarray, g: np.ndarray) -> Iterator[np.ndarray]:
    width = max(min(len(g), _ELEMENTS), 1)
    height = _ELEMENTS // width
    for j in range(0, len(g), width):
        for i in range(0, len(a), height):
            yield np.multiply.outer(a[i : i + height], g[j : j + width])
