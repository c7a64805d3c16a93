"""Capacity metrics with their comparison, and the rows of their tables."""

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jaxkfac._text import number
from jaxkfac.curvature.capacity import (
    METRICS,
    CapacityComparison,
    CapacityInterval,
    CapacityMetrics,
    CapacityRecord,
    Change,
    columns,
    legend,
)
from jaxkfac.jobs.report._layer_table import TableOfLayers
from jaxkfac.jobs.report._page import table_html, terminal_table


class CapacityReport(NamedTuple):
    """Results of `jaxkfac analyze`.

    Attributes:
        metrics: Metrics of the checkpoint.
        interval: Intervals over batches, or ``None``.
        comparison: Comparison with another checkpoint, or ``None``.
        before: Name of the other checkpoint.
        batches: Description of the batches of the interval.
        parameters: Number of all trained parameters, if the metrics may leave some out.
    """

    metrics: CapacityMetrics
    interval: CapacityInterval | None = None
    comparison: CapacityComparison | None = None
    before: str = "before"
    batches: str = ""
    parameters: int | None = None

    @property
    def total_name(self) -> str:
        """What the metrics over all layers are about: the model, or how much of it."""
        measured = self.metrics.model.scalars()["dimension"]
        if self.parameters is None or measured == self.parameters:
            return "whole model"
        return f"{measured:,} of {self.parameters:,} parameters"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the fields that are ``None``."""
        fields = {
            "capacity": self.metrics,
            "capacity_interval": self.interval,
            "capacity_comparison": self.comparison,
        }
        return {name: value.to_dict() for name, value in fields.items() if value is not None}


_TITLES = {"scale-free": "scale-free", "mean": "of the mean loss", "sum": "of the sum over N"}


class ScaleRows(NamedTuple):
    """Metrics of the whole model on one scale, with rows of ``(name, *cells)``."""

    title: str
    rows: list[tuple[str, ...]]


def model_title(report: CapacityReport) -> str:
    """Title of the table of the whole model, with the settings of the metrics."""
    metrics = report.metrics
    name = report.total_name[:1].upper() + report.total_name[1:]
    return f"{name}, N = {metrics.num_examples:,g}, δ = {metrics.damping:g}"


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
    scales = []
    for scale, values in metrics.model.by_scale().items():
        names = [name for name in values if not _is_of_factors(name)]
        rows = [(_label(name, metrics), *_cells(report, name)) for name in names]
        scales.append(ScaleRows(_TITLES[scale], rows))
    empty = [""] * (len(model_head(report)) - 2)
    rows = [
        (_label(name, metrics), number(value), *empty)
        for name, value in vars(metrics.over_layers).items()
    ]
    return [*scales, ScaleRows("over layers", rows)]


def layer_rows(report: CapacityReport) -> list[tuple[str, ...]]:
    """``(name, *cells)`` for each layer, with the whole model last."""
    layers = [*report.metrics.layers.items(), (report.total_name, report.metrics.model)]
    records = [(name, record.scalars()) for name, record in layers]
    return [
        (name, *(number(values.get(metric)) for metric in columns().values()))
        for name, values in records
    ]


def change_rows(report: CapacityReport) -> list[tuple[str, ...]]:
    """``(name, *ratios)`` for each layer in both checkpoints, with the whole model last."""
    comparison = report.comparison
    if comparison is None:
        return []
    changes = [*comparison.layers.items(), (report.total_name, comparison.model)]
    names = columns().values()
    return [(layer, *(number(change[name].ratio) for name in names)) for layer, change in changes]


def interval_words(report: CapacityReport) -> str:
    """Description of the interval."""
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
        interval = report.interval.model[name]
        ends = "–" if interval is None else f"{number(interval.low)} … {number(interval.high)}"
        cells += [number(None if interval is None else interval.mean), ends]
    if report.comparison is not None:
        change = report.comparison.model[name]
        cells += [number(change.before), _change(name, change)]
    return cells


def _change(name: str, change: Change) -> str:
    """A ratio, or the difference for a logarithmic metric."""
    if name in METRICS and METRICS[name].is_logarithm:
        return "–" if change.difference is None else _signed(change.difference)
    return "–" if change.ratio is None else f"× {number(change.ratio)}"


def _signed(value: float) -> str:
    """The value with a sign as wide as a digit."""
    return f"{'−' if value < 0 else '+'} {number(abs(value))}"


def _is_of_factors(name: str) -> bool:
    return name in METRICS and METRICS[name].of_factors


def _label(name: str, metrics: CapacityMetrics) -> str:
    label = METRICS[name].label if name in METRICS else None  # quantiles have no entry
    plain_name = name.replace("num_", "number ").replace("_", " ")
    return plain_name if label is None else label.format(threshold=metrics.threshold)


# ---------------- tables for the terminal


def capacity_table(report: CapacityReport) -> TableOfLayers:
    """One line for each layer, all slices of a stack together, and one for the whole model."""
    return TableOfLayers("Capacity", ["layer", *columns()], layer_rows(report), total=True)


def model_table(report: CapacityReport) -> Table:
    """Every metric of the whole model, with intervals and changes where there are any."""
    table = terminal_table(model_title(report), model_head(report))
    for scale in model_rows(report):
        table.add_row(scale.title, style="dim italic")
        for row in scale.rows:
            table.add_row(f"  {row[0]}", *row[1:])
    return table


def comparison_table(report: CapacityReport) -> TableOfLayers:
    """For each layer in both checkpoints, the ratio after / before of every column."""
    title = f"Capacity, ratio to {report.before}"
    return TableOfLayers(title, ["layer", *columns()], change_rows(report), total=True)


_MOST = 12  # layers that a terminal shows one by one


def curvature_table(report: CapacityReport) -> TableOfLayers:
    """The layers with the largest traces, what the others have together, and the whole model.

    With a comparison, the last two columns are ratios to the other checkpoint.
    """
    model, layers = report.metrics.model, report.metrics.layers
    change = report.comparison
    by_trace = sorted(layers, key=lambda name: -layers[name].trace)
    rest = by_trace[_MOST:] if len(by_trace) > _MOST + 1 else []
    head = ["layer", "share of\ntrace", "entropy\nrank"]
    head += ["condition", "eff.\ndim."] if change is None else ["trace,\nratio", "rank,\nratio"]

    def row(name: str, record: CapacityRecord, changes: Mapping[str, Change]) -> list[str]:
        values = record.scalars()
        cells = [_share(record.trace, model.trace), number(values["entropy_rank"])]
        if change is None:
            names = ("condition", "effective_dimension")
            return [name, *cells, *(number(values[metric]) for metric in names)]
        found = (changes.get(metric) for metric in ("trace", "entropy_rank"))
        return [name, *cells, *("–" if x is None else number(x.ratio) for x in found)]

    changes = {} if change is None else change.layers
    rows = [row(x, layers[x], changes.get(x, {})) for x in by_trace if x not in rest]
    if rest:
        share = _share(sum(layers[name].trace for name in rest), model.trace)
        rows.append([f"{len(rest)} other layers", share, "", "", ""])
    rows.append(row(report.total_name, model, {} if change is None else change.model))
    return TableOfLayers("Curvature by layer", head, rows, total=True)


def _share(trace: float, total: float) -> str:
    return f"{trace / total:.1%}" if total else "–"


def capacity_sentences(report: CapacityReport) -> list[str]:
    """Where the curvature lies, its intervals over batches, and what has changed."""
    metrics, comparison = report.metrics, report.comparison
    sentences = []
    if metrics.model.trace > 0 and len(metrics.layers) > 1:
        largest = max(metrics.layers, key=lambda name: metrics.layers[name].trace)
        share = _share(metrics.layers[largest].trace, metrics.model.trace)
        sentences.append(f"{largest} holds {share} of the trace, more than any other layer.")
    if report.interval is not None:
        interval = report.interval.model["entropy_rank"]
        if interval is not None:
            ends = f"{number(interval.low)} to {number(interval.high)}"
            sentences.append(
                f"The {report.interval.confidence:.0%} interval of the entropy rank of one batch, "
                f"over {report.batches}, is {ends}."
            )
    if comparison is not None:
        trace, rank = (comparison.model[name].ratio for name in ("trace", "entropy_rank"))
        sentences.append(
            f"Its trace is {number(trace)} times and its entropy rank {number(rank)} times "
            f"that of {report.before}."
        )
    return [*sentences, *only_in_one(report)]


def print_capacity(console: Console, report: CapacityReport) -> None:
    """Print the layers, the comparison with another checkpoint, the whole model, and the legend."""
    console.print(capacity_table(report))
    if report.comparison is not None:
        console.print(comparison_table(report))
        for line in only_in_one(report):
            console.print(line)
    console.print(model_table(report))
    console.print(legend(), style="dim")
    if report.interval is not None:
        console.print(f"batch mean, interval: {interval_words(report)}", style="dim")


# ---------------- tables for the page


_FEW = 60  # largest number of rows to show unfolded


def capacity_html(report: CapacityReport) -> str:
    """Tables of the layers, of the whole model, and of the changes."""
    sections = [_of_layers(layer_rows(report), "every layer")]
    rows = [
        row
        for scale in model_rows(report)
        for row in ((scale.title, *[""] * (len(model_head(report)) - 1)), *scale.rows)
    ]
    sections += [
        f"<h3>{escape(model_title(report))}</h3>",
        table_html(model_head(report), rows, text=1),
    ]
    if report.interval is not None:
        sections.append(f"<p>Mean and interval: {escape(interval_words(report))}</p>")
    if report.comparison is not None:
        sections += [
            f"<h3>Ratio to {escape(report.before)}</h3>",
            _of_layers(change_rows(report), "the ratio of every layer"),
            *(f"<p>{escape(line)}</p>" for line in only_in_one(report)),
        ]
    return "".join(sections)


def _of_layers(rows: list[tuple[str, ...]], what: str) -> str:
    """A table of layers and the whole model; many layers are folded behind the last row."""
    head = ["layer", *columns()]
    table = table_html(head, rows, text=1)
    if len(rows) <= _FEW:
        return table
    total_table = table_html(head, rows[-1:], text=1)
    return (
        f"{total_table}<details><summary>{len(rows) - 1} layers: {what}</summary>{table}</details>"
    )
