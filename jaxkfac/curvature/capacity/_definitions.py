r"""The capacity metrics: functions of the eigenvalues $\lambda$, one function each."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxkfac.curvature.capacity._eigenvalues import CapacityBlock, Settings, Sums, sum_log1p
from jaxkfac.curvature.capacity._eigenvalues import quantiles as quantiles_of

# ---------------- the registry of metrics


Scale = Literal["scale-free", "mean", "sum"]
Scalar = float | int | None
Value = Scalar | dict[float, float]


class MeasuredSpectrum(NamedTuple):
    """The argument of every metric: the eigenvalues of one block, or of several together.

    Attributes:
        sums: Quantities that add up over the blocks.
        blocks: The blocks themselves, for quantities that do not add up.
        settings: The arguments of ``capacity_metrics``.
        above: How many eigenvalues of A and of G exceed the threshold; ``None`` for diagonals
            and for the full model.
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
        definition: Computes its value: ``None`` if it is undefined or infinite, a dictionary if it
            is a family of numbers. Its docstring describes the metric.
        scale: See :class:`CapacityRecord`.
        heading: Heading of its column in tables of layers, with a line break where it may be
            broken; ``None`` for no column.
        legend: The formula, below such a table.
        label: Its name in the table of the full model; it may contain ``{threshold}``. ``None``
            takes the metric's own name, in words.
        is_logarithm: Whether two values are compared by difference instead of ratio.
        of_factors: Whether it counts a layer's factors, so that the full model has none.
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
        """Its name in the record, JSON and tables."""
        return self.definition.__name__

    @property
    def description(self) -> str:
        """The docstring of its definition."""
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
    """Register a function as a metric of all future records. The arguments are :class:`Metric`'s.

    JSON, tables, intervals, comparisons and the record's docstring then include it::

        @metric("mean", heading="mean λ", legend="Σλ / dim.")
        def mean_eigenvalue(measured: MeasuredSpectrum) -> float:
            return measured.sums.trace / measured.sums.size

    Raises:
        ValueError: a metric of this name exists.
    """

    def register(definition: Definition) -> Definition:
        new = Metric(definition, scale, heading, legend, label, is_logarithm, of_factors)
        if new.name in _REGISTERED:
            raise ValueError(f"there is a capacity metric {new.name!r} already")
        _REGISTERED[new.name] = new
        return definition

    return register


def columns() -> dict[str, str]:
    """``{heading: metric}`` of tables with a line for each layer."""
    return {m.heading: name for name, m in METRICS.items() if m.heading}


def legend() -> str:
    """The explanation of the columns, below a table."""
    shown = [x for x in METRICS.values() if x.heading and x.legend]
    explanations = [f"{' '.join((m.heading or '').split())}: {m.legend}" for m in shown]
    return "; ".join([*explanations, "–: infinite or undefined"])


# ---------------- the metrics


__all__ = ["METRICS"]  # complete once this module has been imported

# ---------------------------------------------------------------- scale-free


@metric("scale-free", heading="dim.")
def dimension(measured: MeasuredSpectrum) -> int:
    """Number of eigenvalues, which is the number of parameters."""
    return measured.sums.size


@metric("scale-free")
def num_positive(measured: MeasuredSpectrum) -> int:
    r"""Number of positive eigenvalues: the rank. A product counts if both factors are above
    $n \varepsilon \lambda_{\max}$ of their matrix, with n its size and $\varepsilon$ that of its
    dtype; smaller values are rounding errors of zeros.
    """
    return measured.sums.positive


@metric("scale-free", heading="part.\nratio", legend="(Σλ)² / Σλ²")
def participation_ratio(measured: MeasuredSpectrum) -> float:
    r"""$(\sum\lambda)^2 / \sum\lambda^2$, in [1, dimension]; "effective rank" in some papers."""
    trace = measured.sums.trace
    return trace**2 / measured.sums.squares if trace > 0 else 0.0


@metric("scale-free", is_logarithm=True)
def spectral_entropy(measured: MeasuredSpectrum) -> float:
    r"""$H = -\sum p \ln p$ of $p = \lambda / \sum\lambda$, nats."""
    return measured.sums.entropy


@metric("scale-free", heading="entropy\nrank", legend="exp(entropy)")
def entropy_rank(measured: MeasuredSpectrum) -> float:
    """$e^H$, in [1, dimension]; the effective rank of Roy and Vetterli."""
    return math.exp(measured.sums.entropy) if measured.sums.trace > 0 else 0.0


@metric("scale-free", heading="stable\nrank", legend="Σλ² / λmax²")
def stable_rank(measured: MeasuredSpectrum) -> float:
    r"""$\sum\lambda^2 / \lambda_{\max}^2$, the stable rank of the matrix."""
    sums = measured.sums
    return sums.squares / sums.largest**2 if sums.trace > 0 else 0.0


@metric("scale-free")
def intrinsic_dimension(measured: MeasuredSpectrum) -> float:
    r"""$\sum\lambda / \lambda_{\max}$, the stable rank of its root."""
    sums = measured.sums
    return sums.trace / sums.largest if sums.trace > 0 else 0.0


@metric("scale-free", heading="condition", legend="λmax / λmin")
def condition(measured: MeasuredSpectrum) -> float | None:
    r"""$\lambda_{\max} / \lambda_{\min}$, for one block $\kappa_A \kappa_G$; ``None`` (infinite)
    where an eigenvalue is 0.
    """
    return _ratio(measured.sums.largest, measured.sums.smallest)


@metric("scale-free", heading="clipped", legend="the same after clipping")
def condition_clipped(measured: MeasuredSpectrum) -> float | None:
    """The condition number after clipping."""
    return _ratio(measured.sums.largest_clipped, measured.sums.smallest_clipped)


@metric("scale-free")
def local_effective_dimension(measured: MeasuredSpectrum) -> float | None:
    r"""$\sum \ln(1 + \kappa \hat\lambda) / \ln \kappa$ with $\hat\lambda$ scaled to a mean of 1
    and $\kappa = N / (2 \pi \ln N)$, at one point; ``None`` where $\kappa \le 1$ (N < 19) or all
    eigenvalues are 0.
    """
    n, sums = measured.settings.num_examples, measured.sums
    kappa = n / (2 * math.pi * math.log(n)) if n > 1 else 0.0
    if kappa <= 1 or sums.trace == 0:
        return None
    return sum_log1p(measured.blocks, kappa * sums.size / sums.trace) / math.log(kappa)


# ---------------------------------------------------------------- of the mean loss


@metric("mean", heading="trace", legend="Σλ")
def trace(measured: MeasuredSpectrum) -> float:
    r"""$\sum\lambda$."""
    return measured.sums.trace


@metric("mean")
def frobenius(measured: MeasuredSpectrum) -> float:
    r"""$\sqrt{\sum\lambda^2}$."""
    return math.sqrt(measured.sums.squares)


@metric("mean")
def largest(measured: MeasuredSpectrum) -> float:
    r"""$\lambda_{\max}$."""
    return measured.sums.largest


@metric("mean")
def smallest(measured: MeasuredSpectrum) -> float:
    r"""$\lambda_{\min}$."""
    return measured.sums.smallest


@metric("mean", is_logarithm=True)
def log_determinant(measured: MeasuredSpectrum) -> float | None:
    r"""$\sum \ln\lambda$; ``None`` (minus infinity) where an eigenvalue is not positive, as
    ``num_positive`` counts.
    """
    sums = measured.sums
    return sums.log_positive if sums.positive == sums.size else None


@metric("mean", is_logarithm=True)
def log_pseudo_determinant(measured: MeasuredSpectrum) -> float:
    r"""$\sum \ln\lambda$ over the ``num_positive`` positive ones."""
    return measured.sums.log_positive


@metric("mean", label="number above {threshold:g}")
def num_above(measured: MeasuredSpectrum) -> int:
    """Eigenvalues above the threshold."""
    return measured.sums.above


@metric("mean", of_factors=True)
def num_above_a(measured: MeasuredSpectrum) -> int | None:
    """Eigenvalues of the factor A above the threshold, summed over stacked slices; ``None`` for
    diagonals and for the whole model.
    """
    return measured.above[0] if measured.above else None


@metric("mean", of_factors=True)
def num_above_g(measured: MeasuredSpectrum) -> int | None:
    """Eigenvalues of the factor G above the threshold, summed over stacked slices; ``None`` for
    diagonals and for the whole model.
    """
    return measured.above[1] if measured.above else None


@metric("mean")
def trace_powers(measured: MeasuredSpectrum) -> dict[float, float]:
    """``{p: tr F^p}``."""
    return dict(zip(measured.settings.powers, measured.sums.powers, strict=True))


@metric("mean")
def quantiles(measured: MeasuredSpectrum) -> dict[float, float]:
    """``{q: the smallest eigenvalue that at least q of all do not exceed}``."""
    return quantiles_of(measured.blocks, measured.settings.quantiles)


# ---------------------------------------------------------------- of N times the mean loss, damped


@metric("sum", heading="eff.\ndim.", legend="Σ Nλ / (Nλ + δ)")
def effective_dimension(measured: MeasuredSpectrum) -> float:
    r"""$\sum N\lambda / (N\lambda + \delta)$, directions that the data determine better than a
    prior of precision $\delta$ does.
    """
    return measured.sums.effective


@metric("sum", is_logarithm=True)
def log_determinant_damped(measured: MeasuredSpectrum) -> float | None:
    r"""$\sum \ln(N\lambda + \delta)$; ``None`` where that is minus infinity ($\delta = 0$ and an
    eigenvalue is 0).
    """
    damped = measured.sums.log_damped
    return damped if math.isfinite(damped) else None


@metric("sum", label="PAC-Bayes complexity")
def pac_bayes_complexity(measured: MeasuredSpectrum) -> float:
    r"""$\sqrt{\sum\lambda / N}$."""
    return math.sqrt(measured.sums.trace / measured.settings.num_examples)


def _ratio(largest: float, smallest: float) -> float | None:
    ratio = largest / smallest if smallest > 0 else math.inf
    return ratio if math.isfinite(ratio) else None
