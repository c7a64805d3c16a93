"""A capacity metric through the depth of a model."""

from typing import Any

from jaxkfac._checks import instance_of, one_of
from jaxkfac._text import shortened
from jaxkfac.curvature import CapacityMetrics
from jaxkfac.plot._style import SIDES, drawing

_MOST_NAMES = 24  # below the axis


def capacity(metrics: CapacityMetrics, *, metric: str = "entropy_rank", ax: Any = None) -> Any:
    """Draw one metric of each layer, slices of a stack one by one, in the model's order.

    Args:
        metrics: From ``jk.capacity_metrics``.
        metric: Of a record, such as ``"entropy_rank"``, ``"participation_ratio"``,
            ``"effective_dimension"``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes. Where a metric is undefined or infinite there is a gap.

    Raises:
        TypeError: ``metrics`` are no ``CapacityMetrics``.
        ValueError: there is no such metric; all are named.
        ImportError: matplotlib is not installed.
    """
    instance_of("metrics", metrics, CapacityMetrics, "from jk.capacity_metrics(bases, ...)")
    one_of("metric", metric, list(metrics.model.scalars()))
    names, values = [], []
    for name, record in metrics.layers.items():
        for i, part in enumerate(record.parts):
            names.append(f"{name}[{i}]" if record.slices else name)
            value = part.scalars().get(metric)
            values.append(float("nan") if value is None else value)
    with drawing(ax) as axes:
        places = range(len(names))
        axes.plot(places, values, color=SIDES["A"], marker="o", markersize=3)
        step = -(-len(names) // _MOST_NAMES)
        shown = [shortened(name, 28) for name in names[::step]]
        axes.set_xticks(places[::step], shown, rotation=60, ha="right")
        axes.set(ylabel=metric.replace("_", " "))
    return axes
