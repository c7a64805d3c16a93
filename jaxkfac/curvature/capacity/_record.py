"""The capacity metrics of a layer or a model, as one plain record."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxkfac.curvature.capacity._blocks import CapacityBlock
from jaxkfac.curvature.capacity._order import quantiles
from jaxkfac.curvature.capacity._sums import Settings, Sums, sum_log1p

Scalar = float | int | None

# Which scale each metric of a record is on; see its docstring.
SCALES: dict[str, tuple[str, ...]] = {
    "scale-free": (
        "dimension",
        "num_positive",
        "participation_ratio",
        "spectral_entropy",
        "entropy_rank",
        "stable_rank",
        "intrinsic_dimension",
        "condition",
        "condition_clipped",
        "local_effective_dimension",
    ),
    "mean": (
        "trace",
        "frobenius",
        "largest",
        "smallest",
        "log_determinant",
        "log_pseudo_determinant",
        "num_above",
        "num_above_a",
        "num_above_g",
        "trace_powers",
        "quantiles",
    ),
    "sum": ("effective_dimension", "log_determinant_damped", "pac_bayes_complexity"),
}


@dataclasses.dataclass(frozen=True)
class CapacityRecord:
    r"""What the eigenvalues $\lambda$ of a block, or of several together, say about capacity.

    $\lambda$ belong to the curvature of the *mean* loss, as decomposed: no clipping, except
    where said; rounding errors below 0 count as 0. N is the number of examples and $\delta$ the
    damping that the metrics were asked with. Sums over no positive eigenvalue are 0.

    Three scales (``SCALES``). *scale-free*: unchanged when the curvature is multiplied by a
    constant, so these compare across batch sizes and losses. *mean*: in the units of the
    curvature of the mean loss. *sum*: of N times it, the curvature of the sum over the data,
    beside the stated $\delta$.

    Attributes:
        dimension: Number of eigenvalues: of parameters.
        num_positive: How many are positive: the rank. Of products, those whose two factors are
            above $n \varepsilon \lambda_{\max}$ of their matrix, of size n, with $\varepsilon$
            of its dtype; below, they are rounding errors of zeros.
        participation_ratio: $(\sum\lambda)^2 / \sum\lambda^2$, in [1, dimension]; "effective
            rank" in some papers.
        spectral_entropy: $H = -\sum p \ln p$ of $p = \lambda / \sum\lambda$, nats.
        entropy_rank: $e^H$, in [1, dimension]; the effective rank of Roy and Vetterli.
        stable_rank: $\sum\lambda^2 / \lambda_{\max}^2$, the stable rank of the matrix.
        intrinsic_dimension: $\sum\lambda / \lambda_{\max}$, the stable rank of its root.
        condition: $\lambda_{\max} / \lambda_{\min}$, for one block
            $\kappa_A \kappa_G$; ``None`` (infinite) where an eigenvalue is 0.
        condition_clipped: The same after clipping.
        local_effective_dimension: $\sum \ln(1 + \kappa \hat\lambda) / \ln \kappa$ with
            $\hat\lambda$ scaled to a mean of 1 and $\kappa = N / (2 \pi \ln N)$, at one
            point; ``None`` where $\kappa \le 1$ (N < 19) or all eigenvalues are 0.
        trace: $\sum\lambda$. The first on the scale *mean*.
        frobenius: $\sqrt{\sum\lambda^2}$.
        largest: $\lambda_{\max}$.
        smallest: $\lambda_{\min}$.
        log_determinant: $\sum \ln\lambda$; ``None`` (minus infinity) where an eigenvalue
            is not positive, as ``num_positive`` counts.
        log_pseudo_determinant: $\sum \ln\lambda$ over the ``num_positive`` positive ones.
        num_above: Eigenvalues above the threshold.
        num_above_a: Eigenvalues of the factor A above the threshold, summed over stacked
            slices; ``None`` for diagonals and for the whole model.
        num_above_g: Likewise of G.
        trace_powers: ``{p: tr F^p}``.
        quantiles: ``{q: the smallest eigenvalue that at least q of all do not exceed}``.
        effective_dimension: $\sum N\lambda / (N\lambda + \delta)$, directions that the data
            determine better than a prior of precision $\delta$ does. The first on the scale
            *sum*.
        log_determinant_damped: $\sum \ln(N\lambda + \delta)$; ``None`` where that is minus
            infinity ($\delta = 0$ and an eigenvalue is 0).
        pac_bayes_complexity: $\sqrt{\sum\lambda / N}$.
        slices: Records of the stacked slices of a layer, in the order of its stack; empty
            without one and for the whole model.

    References:
        Roy and Vetterli, The effective rank: a measure of effective dimensionality, 2007.
        MacKay, Bayesian interpolation, 1992 (effective number of parameters).
        Abbas, Sutter, Figalli and Woerner, Effective dimension of machine learning models,
        2021 (local effective dimension).
    """

    dimension: int
    num_positive: int
    participation_ratio: float
    spectral_entropy: float
    entropy_rank: float
    stable_rank: float
    intrinsic_dimension: float
    condition: float | None
    condition_clipped: float | None
    local_effective_dimension: float | None
    trace: float
    frobenius: float
    largest: float
    smallest: float
    log_determinant: float | None
    log_pseudo_determinant: float
    num_above: int
    num_above_a: int | None
    num_above_g: int | None
    trace_powers: dict[float, float]
    quantiles: dict[float, float]
    effective_dimension: float
    log_determinant_damped: float | None
    pac_bayes_complexity: float
    slices: "tuple[CapacityRecord, ...]" = ()

    @property
    def parts(self) -> "tuple[CapacityRecord, ...]":
        """The slices, or this record alone where there are none."""
        return self.slices or (self,)

    def by_scale(self) -> dict[str, dict[str, Scalar]]:
        """Every metric as one number, in ``SCALES``; ``quantiles`` read ``quantile_0.5``."""
        return {
            scale: {name: x for field in fields for name, x in self._numbers(field)}
            for scale, fields in SCALES.items()
        }

    def scalars(self) -> dict[str, Scalar]:
        """:meth:`by_scale` without the scales."""
        return {name: x for part in self.by_scale().values() for name, x in part.items()}

    def _numbers(self, field: str) -> list[tuple[str, Scalar]]:
        value = getattr(self, field)
        if not isinstance(value, dict):
            return [(field, value)]
        return [(f"{field.removesuffix('s')}_{key:g}", x) for key, x in value.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: :meth:`scalars`, and ``slices`` where there are any."""
        slices = {"slices": [part.to_dict() for part in self.slices]} if self.slices else {}
        return {**self.scalars(), **slices}


def record_of(
    sums: Sums,
    blocks: Sequence[CapacityBlock],
    settings: Settings,
    *,
    above: tuple[int, int] | None = None,
    slices: tuple[CapacityRecord, ...] = (),
) -> CapacityRecord:
    """The record of ``blocks`` together, whose sums are known.

    ``above`` counts the eigenvalues of A and G above the threshold.
    """
    trace, squares, positive = sums.trace, sums.squares, sums.trace > 0
    return CapacityRecord(
        dimension=sums.size,
        num_positive=sums.positive,
        participation_ratio=trace**2 / squares if positive else 0.0,
        spectral_entropy=sums.entropy,
        entropy_rank=math.exp(sums.entropy) if positive else 0.0,
        stable_rank=squares / sums.largest**2 if positive else 0.0,
        intrinsic_dimension=trace / sums.largest if positive else 0.0,
        condition=_ratio(sums.largest, sums.smallest),
        condition_clipped=_ratio(sums.largest_clipped, sums.smallest_clipped),
        local_effective_dimension=_local_effective_dimension(sums, blocks, settings.num_examples),
        trace=trace,
        frobenius=math.sqrt(squares),
        largest=sums.largest,
        smallest=sums.smallest,
        log_determinant=sums.log_positive if sums.positive == sums.size else None,
        log_pseudo_determinant=sums.log_positive,
        num_above=sums.above,
        num_above_a=above[0] if above else None,
        num_above_g=above[1] if above else None,
        trace_powers=dict(zip(settings.powers, sums.powers, strict=True)),
        quantiles=quantiles(blocks, settings.quantiles),
        effective_dimension=sums.effective,
        log_determinant_damped=sums.log_damped if math.isfinite(sums.log_damped) else None,
        pac_bayes_complexity=math.sqrt(trace / settings.num_examples),
        slices=slices,
    )


def _ratio(largest: float, smallest: float) -> float | None:
    ratio = largest / smallest if smallest > 0 else math.inf
    return ratio if math.isfinite(ratio) else None


def _local_effective_dimension(
    sums: Sums, blocks: Sequence[CapacityBlock], num_examples: float
) -> float | None:
    kappa = num_examples / (2 * math.pi * math.log(num_examples)) if num_examples > 1 else 0.0
    if kappa <= 1 or sums.trace == 0:
        return None
    return sum_log1p(blocks, kappa * sums.size / sums.trace) / math.log(kappa)
