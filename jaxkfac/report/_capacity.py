"""Capacity metrics with what they are compared with, and the rows of their tables."""

from typing import Any, NamedTuple

from jaxkfac._text import number
from jaxkfac.curvature import CapacityComparison, CapacityInterval, CapacityMetrics, Change
from jaxkfac.curvature.capacity import METRICS, columns


class CapacityReport(NamedTuple):
    """What `jaxkfac analyze` has measured.

    Attributes:
        metrics: Of the checkpoint.
        interval: Over batches, or ``None``.
        comparison: With another checkpoint, or ``None``.
        before: What the other checkpoint is called.
        batches: What the interval is over, in words.
    """

    metrics: CapacityMetrics
    interval: CapacityInterval | None = None
    comparison: CapacityComparison | None = None
    before: str = "before"
    batches: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a part that was not asked for is left out."""
        parts = {
            "capacity": self.metrics,
            "capacity_interval": self.interval,
            "capacity_comparison": self.comparison,
        }
        return {name: part.to_dict() for name, part in parts.items() if part is not None}


_TITLES = {"scale-free": "scale-free", "mean": "of the mean loss", "sum": "of the sum over N"}


class ScaleRows(NamedTuple):
    """The metrics of the whole model on one scale: ``(name, *cells)`` in each row."""

    title: str
    rows: list[tuple[str, ...]]


def model_title(report: CapacityReport) -> str:
    """What the whole model's metrics were asked with."""
    metrics = report.metrics
    return f"Whole model, N = {metrics.num_examples:,g}, δ = {metrics.damping:g}"


def model_head(report: CapacityReport) -> list[str]:
    """Headings of the rows of :func:`model_rows`."""
    head = ["metric", "value"]
    if report.interval is not None:
        head += ["batch mean", f"{report.interval.confidence:.0%} interval"]
    if report.comparison is not None:
        head += [report.before, "change"]
    return head


def model_rows(report: CapacityReport) -> list[ScaleRows]:
    """Every metric of the whole model, by scale."""
    metrics = report.metrics
    parts = []
    for scale, values in metrics.model.by_scale().items():
        names = [name for name in values if not _is_of_factors(name)]
        rows = [(_words(name, metrics), *_cells(report, name)) for name in names]
        parts.append(ScaleRows(_TITLES[scale], rows))
    empty = [""] * (len(model_head(report)) - 2)
    rows = [
        (_words(name, metrics), number(value), *empty)
        for name, value in vars(metrics.over_layers).items()
    ]
    return [*parts, ScaleRows("over layers", rows)]


def layer_rows(report: CapacityReport) -> list[tuple[str, ...]]:
    """``(name, *cells)`` of each layer, and the whole model last."""
    layers = [*report.metrics.layers.items(), ("whole model", report.metrics.model)]
    records = [(name, record.scalars()) for name, record in layers]
    return [
        (name, *(number(values.get(metric)) for metric in columns().values()))
        for name, values in records
    ]


def change_rows(report: CapacityReport) -> list[tuple[str, ...]]:
    """``(name, *ratios)`` of each layer in both checkpoints, and the whole model last."""
    comparison = report.comparison
    if comparison is None:
        return []
    changes = [*comparison.layers.items(), ("whole model", comparison.model)]
    names = columns().values()
    return [(layer, *(number(change[name].ratio) for name in names)) for layer, change in changes]


def interval_words(report: CapacityReport) -> str:
    """What the interval is for."""
    return (
        f"for the metrics of one batch, over {report.batches}. Ranks grow with the batch, so "
        "those of the running average may lie above it."
    )


def only_in_one(report: CapacityReport) -> list[str]:
    """One sentence for each checkpoint that has layers which the other lacks."""
    comparison = report.comparison
    if comparison is None:
        return []
    places = ((report.before, comparison.only_before), ("this checkpoint", comparison.only_after))
    return [f"Only in {place}: {', '.join(names)}." for place, names in places if names]


def _cells(report: CapacityReport, name: str) -> list[str]:
    cells = [number(report.metrics.model.scalars()[name])]
    if report.interval is not None:
        found = report.interval.model[name]
        ends = "–" if found is None else f"{number(found.low)} … {number(found.high)}"
        cells += [number(None if found is None else found.mean), ends]
    if report.comparison is not None:
        change = report.comparison.model[name]
        cells += [number(change.before), _change(name, change)]
    return cells


def _change(name: str, change: Change) -> str:
    """A factor, or the difference of a logarithm."""
    if name in METRICS and METRICS[name].is_logarithm:
        return "–" if change.difference is None else _signed(change.difference)
    return "–" if change.ratio is None else f"× {number(change.ratio)}"


def _signed(value: float) -> str:
    """With a sign that is as wide as a figure."""
    return f"{'−' if value < 0 else '+'} {number(abs(value))}"


def _is_of_factors(name: str) -> bool:
    return name in METRICS and METRICS[name].of_factors


def _words(name: str, metrics: CapacityMetrics) -> str:
    label = METRICS[name].label if name in METRICS else None  # a quantile is one of several
    words = name.replace("num_", "number ").replace("_", " ")
    return words if label is None else label.format(threshold=metrics.threshold)
