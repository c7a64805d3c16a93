"""What a capacity metric is: a function of the measured eigenvalues, and how it is shown."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxkfac.curvature.capacity._blocks import CapacityBlock
from jaxkfac.curvature.capacity._sums import Settings, Sums

Scale = Literal["scale-free", "mean", "sum"]
Scalar = float | int | None
Value = Scalar | dict[float, float]


class MeasuredSpectrum(NamedTuple):
    """What metrics are functions of: the eigenvalues of a block, or of several together.

    Attributes:
        sums: What adds up over the blocks.
        blocks: The blocks themselves, for what does not.
        settings: What the metrics were asked with.
        above: How many eigenvalues of A and of G exceed the threshold; ``None`` for diagonals
            and for the whole model.
    """

    sums: Sums
    blocks: Sequence[CapacityBlock]
    settings: Settings
    above: tuple[int, int] | None


Definition = Callable[[MeasuredSpectrum], Value]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of :class:`CapacityRecord`.

    Attributes:
        definition: Its value; ``None`` where it is undefined or infinite, a dictionary where
            it is a family of numbers. The docstring is the metric's.
        scale: See :class:`CapacityRecord`.
        heading: Of its column in tables of layers, a line break where it may be broken;
            ``None`` for no column.
        legend: The formula, below such a table.
        label: Its name in the table of the whole model, where ``threshold`` may be named;
            ``None`` is the own name in words.
        is_logarithm: Whether two values are compared by difference, not by ratio.
        of_factors: Whether a layer has it by its factors, so that the model has none.
    """

    definition: Definition
    scale: Scale
    heading: str | None = None
    legend: str | None = None
    label: str | None = None
    is_logarithm: bool = False
    of_factors: bool = False

    @property
    def name(self) -> str:
        """What the record, JSON and tables call it."""
        return self.definition.__name__

    @property
    def description(self) -> str:
        """What it is."""
        return inspect.getdoc(self.definition) or ""


_REGISTERED: dict[str, Metric] = {}
METRICS: Mapping[str, Metric] = MappingProxyType(_REGISTERED)


def metric(
    scale: Scale,
    *,
    heading: str | None = None,
    legend: str | None = None,
    label: str | None = None,
    is_logarithm: bool = False,
    of_factors: bool = False,
) -> Callable[[Definition], Definition]:
    """Make a function a metric of every record from now on. The arguments are :class:`Metric`'s.

    All else follows from it: JSON, tables, intervals, comparisons, the record's docstring::

        @metric("mean", heading="mean λ", legend="Σλ / dim.")
        def mean_eigenvalue(measured: MeasuredSpectrum) -> float:
            return measured.sums.trace / measured.sums.size

    Raises:
        ValueError: there is a metric of this name.
    """

    def register(definition: Definition) -> Definition:
        found = Metric(definition, scale, heading, legend, label, is_logarithm, of_factors)
        if found.name in _REGISTERED:
            raise ValueError(f"there is a capacity metric {found.name!r} already")
        _REGISTERED[found.name] = found
        return definition

    return register


def columns() -> dict[str, str]:
    """``{heading: metric}`` of tables with a line for each layer."""
    return {found.heading: name for name, found in METRICS.items() if found.heading}


def legend() -> str:
    """What the columns are."""
    shown = [found for found in METRICS.values() if found.heading and found.legend]
    each = [f"{' '.join((m.heading or '').split())}: {m.legend}" for m in shown]
    return "; ".join([*each, "–: infinite or undefined"])
