"""Exponential averages of factors over steps."""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from torch_ref.factors._statistics import LayerFactors


def update_average(
    average: Mapping[str, LayerFactors] | None, factors: Mapping[str, LayerFactors], decay: float
) -> dict[str, LayerFactors]:
    r"""$\beta \cdot \text{average} + (1 - \beta) \cdot \text{factors}$; the first step is itself.

    Args:
        average: So far; ``None`` before the first step, :func:`zeros_like` for an average that
            :func:`debias` divides.
        factors: Of this step, on the same scale. Where the number of rows changes between
            steps, convert first (:func:`to_sum_scale`): G's scale depends on it.
        decay: $\beta \in [0, 1)$.

    Raises:
        ValueError: ``decay`` is out of range, or the layers differ.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")
    if average is None:
        return dict(factors)
    if average.keys() != factors.keys():
        differ = sorted(average.keys() ^ factors.keys())
        raise ValueError(f"average and factors differ in the layers {differ}")
    return {name: _blend(average[name], new, decay) for name, new in factors.items()}


def zeros_like(factors: Mapping[str, LayerFactors]) -> dict[str, LayerFactors]:
    """Zeros in the shapes of ``factors``."""
    return _map(factors, torch.zeros_like)


def debias(
    average: Mapping[str, LayerFactors], decay: float, steps: int
) -> dict[str, LayerFactors]:
    r"""An average that started from zeros, divided by $1 - \beta^t$ after t steps."""
    if steps < 1:
        raise ValueError(f"an average of {steps} steps is zero; update it first")
    return _map(average, lambda x: x / (1 - decay**steps))


def _blend(old: LayerFactors, new: LayerFactors, decay: float) -> LayerFactors:
    return LayerFactors(
        a=decay * old.a + (1 - decay) * new.a,
        g=decay * old.g + (1 - decay) * new.g,
        rows=new.rows if new.rows == old.rows else None,
        bias=new.bias,
    )


def _map(
    factors: Mapping[str, LayerFactors], function: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, LayerFactors]:
    return {
        name: dataclasses.replace(f, a=function(f.a), g=function(f.g))
        for name, f in factors.items()
    }
