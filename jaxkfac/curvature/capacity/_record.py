"""The capacity metrics of a layer or a model, as one plain record."""

import dataclasses
from typing import Any, get_args

from jaxkfac._errors import nearest
from jaxkfac.curvature.capacity._definitions import METRICS
from jaxkfac.curvature.capacity._metric import MeasuredSpectrum, Scalar, Scale, Value


@dataclasses.dataclass(frozen=True)
class CapacityRecord:
    r"""What the eigenvalues $\lambda$ of a block, or of several together, say about capacity.

    $\lambda$ belong to the curvature of the *mean* loss, as decomposed: no clipping, except
    where said; rounding errors below 0 count as 0. N is the number of examples and $\delta$ the
    damping that the metrics were asked with. Sums over no positive eigenvalue are 0.

    Three scales. *scale-free*: unchanged when the curvature is multiplied by a constant, so
    these compare across batch sizes and losses. *mean*: in the units of the curvature of the
    mean loss. *sum*: of N times it, the curvature of the sum over the data, beside the stated
    $\delta$.

    Each metric is an attribute, ``record.entropy_rank``:

    {metrics}

    Attributes:
        values: ``{metric: value}``.
        slices: Records of the stacked slices of a layer, in the order of its stack; empty
            without one and for the whole model.

    References:
        Roy and Vetterli, The effective rank: a measure of effective dimensionality, 2007.
        MacKay, Bayesian interpolation, 1992 (effective number of parameters).
        Abbas, Sutter, Figalli and Woerner, Effective dimension of machine learning models,
        2021 (local effective dimension).
    """

    values: dict[str, Value]
    slices: "tuple[CapacityRecord, ...]" = ()

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("values", {})  # a copy is made before it has any
        if name in values:
            return values[name]
        raise AttributeError(f"no metric {name!r}; the nearest names are {nearest(name, values)}")

    @property
    def parts(self) -> "tuple[CapacityRecord, ...]":
        """The slices, or this record alone where there are none."""
        return self.slices or (self,)

    def by_scale(self) -> dict[str, dict[str, Scalar]]:
        """Every metric as one number, by scale; ``quantiles`` read ``quantile_0.5``."""
        return {
            scale: {name: x for field in fields for name, x in self._numbers(field)}
            for scale, fields in scales().items()
        }

    def scalars(self) -> dict[str, Scalar]:
        """:meth:`by_scale` without the scales."""
        return {name: x for part in self.by_scale().values() for name, x in part.items()}

    def _numbers(self, field: str) -> list[tuple[str, Scalar]]:
        if field not in self.values:  # measured before the metric was registered
            return []
        value = self.values[field]
        if not isinstance(value, dict):
            return [(field, value)]
        return [(f"{field.removesuffix('s')}_{key:g}", x) for key, x in value.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: :meth:`scalars`, and ``slices`` where there are any."""
        slices = {"slices": [part.to_dict() for part in self.slices]} if self.slices else {}
        return {**self.scalars(), **slices}


def record_of(
    measured: MeasuredSpectrum, slices: tuple[CapacityRecord, ...] = ()
) -> CapacityRecord:
    """Every registered metric of what was measured."""
    return CapacityRecord({name: m.definition(measured) for name, m in METRICS.items()}, slices)


def scales() -> dict[Scale, list[str]]:
    """``{scale: metrics}``."""
    return {
        scale: [name for name, found in METRICS.items() if found.scale == scale]
        for scale in get_args(Scale)
    }


def _described() -> str:
    lines = [
        f"* ``{name}`` ({METRICS[name].scale}): {' '.join(METRICS[name].description.split())}"
        for names in scales().values()
        for name in names
    ]
    return "\n    ".join(lines)


if CapacityRecord.__doc__:  # python -OO has none
    CapacityRecord.__doc__ = CapacityRecord.__doc__.replace("{metrics}", _described())
