"""How much of a model is in use, read from the eigenvalues of its curvature."""

from jaxkfac.curvature.capacity._comparison import (
    CapacityComparison,
    CapacityInterval,
    Change,
    Interval,
    capacity_interval,
    compare_capacity,
    mean_interval,
)
from jaxkfac.curvature.capacity._definitions import (
    METRICS,
    MeasuredSpectrum,
    Metric,
    columns,
    legend,
    metric,
)
from jaxkfac.curvature.capacity._eigenvalues import diagonal_rows
from jaxkfac.curvature.capacity._metrics import (
    CapacityMetrics,
    CapacityRecord,
    OverLayers,
    capacity_metrics,
)

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
