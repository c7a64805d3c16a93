r"""The capacity metrics, one function each, of the eigenvalues $\lambda$."""

import math

from jaxkfac.curvature.capacity._metric import METRICS, MeasuredSpectrum, metric
from jaxkfac.curvature.capacity._order import quantiles as quantiles_of
from jaxkfac.curvature.capacity._sums import sum_log1p

__all__ = ["METRICS"]  # which has them all once this module is read

# ---------------------------------------------------------------- scale-free


@metric("scale-free", heading="dim.")
def dimension(measured: MeasuredSpectrum) -> int:
    """Number of eigenvalues: of parameters."""
    return measured.sums.size


@metric("scale-free")
def num_positive(measured: MeasuredSpectrum) -> int:
    r"""How many are positive: the rank. Of products, those whose two factors are above
    $n \varepsilon \lambda_{\max}$ of their matrix, of size n, with $\varepsilon$ of its dtype;
    below, they are rounding errors of zeros.
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
    """The same after clipping."""
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
    """Likewise of G."""
    return measured.above[1] if measured.above else None


@metric("mean")
def trace_powers(measured: MeasuredSpectrum) -> dict[float, float]:
    """``{p: tr F^p}``."""
    return dict(zip(measured.settings.powers, measured.sums.powers, strict=True))


@metric("mean")
def quantiles(measured: MeasuredSpectrum) -> dict[float, float]:
    """``{q: the smallest eigenvalue that at least q of all do not exceed}``."""
    return quantiles_of(measured.blocks, measured.settings.quantiles)


# ---------------------------------------------------------------- of N times it, and damping


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
