"""How capacity varies from batch to batch, and what changed between two checkpoints."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxkfac._text import number, ruled
from jaxkfac.curvature.capacity._definitions import Scalar, columns
from jaxkfac.curvature.capacity._metrics import CapacityMetrics, CapacityRecord

# ---------------- variation over batches


class Interval(NamedTuple):
    """A mean and its confidence interval, for a metric over batches or for other numbers.

    Attributes:
        mean: Mean of the numbers.
        low: Lower end of the interval for the mean.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityInterval:
    """Intervals of every metric; ``None`` if a batch lacks it (an infinite condition number).

    Attributes:
        model: ``{metric: Interval}`` of the whole model.
        layers: ``{layer: {metric: Interval}}``.
        num_batches: Number of batches measured.
        confidence: Confidence of the intervals.
    """

    model: dict[str, Interval | None]
    layers: dict[str, dict[str, Interval | None]]
    num_batches: int
    confidence: float

    def __repr__(self) -> str:
        """One line; ``print`` shows the table."""
        of = f"{len(self.layers)} layers over {self.num_batches} batches"
        return f"CapacityInterval of {of}, {self.confidence:.0%}"

    def __str__(self) -> str:
        rows = [[name, *map(number, x or (None,) * 3)] for name, x in self.model.items()]
        title = f"whole model: {self.confidence:.0%} intervals over {self.num_batches} batches"
        return "\n".join([title, *ruled(["metric", "mean", "low", "high"], rows)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: each interval as ``{"mean", "low", "high"}``."""
        return {
            "num_batches": self.num_batches,
            "confidence": self.confidence,
            "model": _plain_intervals(self.model),
            "layers": {name: _plain_intervals(values) for name, values in self.layers.items()},
        }


def capacity_interval(
    metrics: Sequence[CapacityMetrics], *, confidence: float = 0.95
) -> CapacityInterval:
    r"""Mean and confidence interval of every metric, from the metrics of single batches.

    Each interval is computed by :func:`mean_interval`.

    The interval is for the metric of *one batch of this size*. Ranks grow with the batch (a factor
    of B rows has rank at most B), so it is not centered on the metric of the average over batches.

    Args:
        metrics: One for each batch, at least two, of the same model with the same
            ``num_examples``, ``damping`` and ``threshold``.
        confidence: In (0, 1).

    Returns:
        An interval for every metric that all batches have.

    Raises:
        ValueError: fewer than two, ``confidence`` out of range, or metrics that differ in
            their layers or arguments.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, metrics = jk.value_grad_and_factors(objective), []
        >>> for key in jax.random.split(jax.random.key(0), 4):
        ...     x = jax.random.normal(key, (8, 3))
        ...     value, grads, factors = stats(params, (x, jnp.zeros((8, 2))))
        ...     bases = jk.eigendecompose(factors, vectors=False)
        ...     metrics.append(jk.capacity_metrics(bases, num_examples=32))
        >>> rank = jk.capacity_interval(metrics).model["entropy_rank"]
        >>> rank.low < rank.mean < rank.high
        True
    """
    metrics = list(metrics)
    if len(metrics) < 2:
        raise ValueError(f"intervals need the metrics of two batches at least, got {len(metrics)}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    first = metrics[0]
    for current in metrics[1:]:
        check_same_settings(first, current)
        if first.layers.keys() != current.layers.keys():
            odd = sorted(first.layers.keys() ^ current.layers.keys())
            raise ValueError(f"the metrics are of different models: {odd} are not in all of them")
    return CapacityInterval(
        model=_intervals([m.model for m in metrics], confidence),
        layers={
            name: _intervals([m.layers[name] for m in metrics], confidence) for name in first.layers
        },
        num_batches=len(metrics),
        confidence=confidence,
    )


def check_same_settings(one: CapacityMetrics, other: CapacityMetrics) -> None:
    """Refuse to compare metrics that were computed with different arguments.

    Raises:
        ValueError: naming the argument and both values.
    """
    for name in ("num_examples", "damping", "threshold"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            raise ValueError(f"metrics with {name}={a:g} and {name}={b:g}: measure both with one")


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    r"""Mean of independent numbers, and Student's confidence interval for it.

    For K numbers with mean $\bar x$ and standard deviation $s$ (K - 1 in its denominator) it is
    $\bar x \pm t_{K-1} s / \sqrt K$, with the quantile $t_{K-1}$ of Student's distribution. It is
    exact for normal numbers, and close for others unless K is tiny.

    Args:
        values: At least two.
        confidence: In (0, 1).

    Raises:
        ValueError: fewer than two.
    """
    from scipy.special import stdtrit  # jax depends on scipy

    if len(values) < 2:
        raise ValueError(f"an interval needs two numbers at least, got {len(values)}")
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)


def _intervals(records: Sequence[CapacityRecord], confidence: float) -> dict[str, Interval | None]:
    batches = [record.scalars() for record in records]
    names = [name for name in batches[0] if all(name in batch for batch in batches)]
    return {name: _interval([batch[name] for batch in batches], confidence) for name in names}


def _interval(values: Sequence[Scalar], confidence: float) -> Interval | None:
    finite = [float(value) for value in values if value is not None]
    return None if len(finite) < len(values) else mean_interval(finite, confidence=confidence)


def _plain_intervals(intervals: dict[str, Interval | None]) -> dict[str, dict[str, float] | None]:
    return {name: None if x is None else x._asdict() for name, x in intervals.items()}


# ---------------- changes between two checkpoints


class Change(NamedTuple):
    """One metric before and after.

    Attributes:
        before: ``None`` if undefined or infinite, as in the record.
        after: ``None`` if undefined or infinite.
        difference: ``after - before``; ``None`` if either is ``None``.
        ratio: ``after / before``; ``None`` if either is ``None`` or ``before`` is 0.
    """

    before: Scalar
    after: Scalar
    difference: Scalar
    ratio: Scalar


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityComparison:
    """Changes of every metric. ``print`` shows ratios, ``to_dict()`` is ready for JSON.

    Attributes:
        model: ``{metric: Change}`` of the whole model.
        layers: ``{layer: {metric: Change}}`` of the layers in both.
        only_before: Layers that are not in ``after``.
        only_after: Layers that are not in ``before``.
    """

    model: dict[str, Change]
    layers: dict[str, dict[str, Change]]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def __repr__(self) -> str:
        """One line; ``print`` shows the table."""
        alone = len(self.only_before) + len(self.only_after)
        return f"CapacityComparison of {len(self.layers)} layers, {alone} in one of both only"

    def __str__(self) -> str:
        rows = [[name, *_ratios(changes)] for name, changes in self.layers.items()]
        rows.append(["whole model", *_ratios(self.model)])
        lines = ruled(["after / before", *columns()], rows, total=True)
        for title, names in (("before", self.only_before), ("after", self.only_after)):
            lines += [f"only {title}: {name}" for name in names]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": _plain_changes(self.model),
            "layers": {name: _plain_changes(changes) for name, changes in self.layers.items()},
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }


def compare_capacity(before: CapacityMetrics, after: CapacityMetrics) -> CapacityComparison:
    """Differences and ratios of every metric, per layer and for the whole model.

    Args:
        before: Metrics of one checkpoint.
        after: Metrics of another checkpoint, with the same ``num_examples``, ``damping`` and
            ``threshold``. The models may differ: layers in only one of them are listed, and their
            blocks count in that model only.

    Returns:
        The changes.

    Raises:
        ValueError: the metrics were computed with different arguments.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, metrics = jk.value_grad_and_factors(objective), []
        >>> for target in (0.0, -1.0):  # the residual doubles
        ...     value, grads, factors = stats(params, (jnp.eye(3), jnp.full((3, 2), target)))
        ...     bases = jk.eigendecompose(factors, vectors=False)
        ...     metrics.append(jk.capacity_metrics(bases, num_examples=3))
        >>> round(jk.compare_capacity(*metrics).model["trace"].ratio, 3)
        4.0
    """
    check_same_settings(before, after)
    both = [name for name in before.layers if name in after.layers]
    return CapacityComparison(
        model=_changes(before.model, after.model),
        layers={name: _changes(before.layers[name], after.layers[name]) for name in both},
        only_before=tuple(name for name in before.layers if name not in after.layers),
        only_after=tuple(name for name in after.layers if name not in before.layers),
    )


def _changes(before: CapacityRecord, after: CapacityRecord) -> dict[str, Change]:
    old, new = before.scalars(), after.scalars()
    return {name: _change(old[name], new[name]) for name in old if name in new}


def _change(before: Scalar, after: Scalar) -> Change:
    if before is None or after is None:
        return Change(before, after, None, None)
    return Change(before, after, after - before, after / before if before else None)


def _ratios(changes: Mapping[str, Change]) -> list[str]:
    return [number(changes[name].ratio) for name in columns().values()]


def _plain_changes(changes: Mapping[str, Change]) -> dict[str, dict[str, Scalar]]:
    return {name: change._asdict() for name, change in changes.items()}
