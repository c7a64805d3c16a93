"""How much of a model is in use, read from the eigenvalues of its curvature."""

from jaxkfac.curvature.capacity._blocks import diagonal_rows
from jaxkfac.curvature.capacity._comparison import CapacityComparison, Change, compare_capacity
from jaxkfac.curvature.capacity._definitions import METRICS
from jaxkfac.curvature.capacity._interval import (
    CapacityInterval,
    Interval,
    capacity_interval,
    mean_interval,
)
from jaxkfac.curvature.capacity._metric import MeasuredSpectrum, Metric, columns, legend, metric
from jaxkfac.curvature.capacity._metrics import CapacityMetrics, OverLayers, capacity_metrics
from jaxkfac.curvature.capacity._record import CapacityRecord

__all__ = [
    "METRICS",
    "CapacityComparison",
    "CapacityInterval",
    "CapacityMetrics",
    "CapacityRecord",
    "Change",
    "Interval",
    "MeasuredSpectrum",
    "Metric",
    "OverLayers",
    "capacity_interval",
    "capacity_metrics",
    "columns",
    "compare_capacity",
    "diagonal_rows",
    "legend",
    "mean_interval",
    "metric",
]
