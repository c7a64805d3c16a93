"""Between the documents' scale of G and the one that a sum over loss terms gives."""

import dataclasses
from collections.abc import Mapping

from torch_ref.factors._statistics import LayerFactors


def to_sum_scale(
    factors: Mapping[str, LayerFactors], *, loss_terms: float
) -> dict[str, LayerFactors]:
    r"""From $g$ of the mean loss to $g$ of the sum over one example's terms.

    With T loss terms in the batch (N examples of R terms), $g_{\text{sum}} = T g_{\text{mean}}$.
    The documents divide $\sum g g^\top$ by the rows, the other scale divides it by T:

    $$ G_{\text{sum}} = \frac{1}{T} \sum (T g)(T g)^\top
        = \frac{T^2 \, \text{rows}}{T} \cdot \frac{1}{\text{rows}} \sum g g^\top
        = \text{rows}^1 \, T^1 \, G. $$

    Where each row carries one loss term, T = rows and the factor is $\text{rows}^2$. A has no
    gradient in it and stays.

    Args:
        factors: On the documents' scale, of one batch.
        loss_terms: T, all unmasked terms of the batch that the loss is the mean of; where terms
            have weights, their sum.

    Raises:
        ValueError: ``loss_terms`` is not positive, or the factors are an average over different
            row counts.
    """
    return _scale_g(factors, loss_terms, power=1)


def to_mean_scale(
    factors: Mapping[str, LayerFactors], *, loss_terms: float
) -> dict[str, LayerFactors]:
    r"""The inverse of :func:`to_sum_scale`: $G = \text{rows}^{-1} T^{-1} G_{\text{sum}}$."""
    return _scale_g(factors, loss_terms, power=-1)


def _scale_g(
    factors: Mapping[str, LayerFactors], loss_terms: float, *, power: int
) -> dict[str, LayerFactors]:
    if not loss_terms > 0:
        raise ValueError(f"loss_terms must be positive, got {loss_terms}")
    unknown = [name for name, f in factors.items() if f.rows is None]
    if unknown:
        raise ValueError(
            f"the factors of {unknown} average steps with different row counts; convert each "
            "step before averaging"
        )
    return {
        name: dataclasses.replace(f, g=f.g * (float(f.rows) * loss_terms) ** power)
        for name, f in factors.items()
    }
