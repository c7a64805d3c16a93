"""Capacity metrics from the eigenvalues of A and G, within a bound on memory."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch

from torch_ref.curvature._bases import LayerBasis


@dataclasses.dataclass(frozen=True)
class LayerCapacity:
    r"""What the eigenvalues $\lambda = \alpha_i \gamma_j$ of a layer say; raw ones, unclipped.

    Attributes:
        trace: $\sum \lambda$.
        log_determinant: $\sum \ln(\lambda + \delta)$; minus infinity for a singular block
            without damping.
        effective_rank: $(\sum \lambda)^2 / \sum \lambda^2$.
        condition_number: $\lambda_{\max} / \lambda_{\min}$; infinite for a singular block.
        num_above: Products above the threshold.
        num_above_a: Eigenvalues of A above it, in their own units.
        num_above_g: Eigenvalues of G above it.
        pac_bayes_complexity: $\sqrt{\operatorname{trace} / n}$.
        dimension: How many eigenvalues there are.
    """

    trace: float
    log_determinant: float
    effective_rank: float
    condition_number: float
    num_above: int
    num_above_a: int
    num_above_g: int
    pac_bayes_complexity: float
    dimension: int


@dataclasses.dataclass(frozen=True)
class ModelCapacity:
    """The layers together.

    Attributes:
        layers: By name.
        trace: Sum over layers.
        log_determinant: Sum over layers.
        mean_effective_rank: Mean over layers.
        largest_condition_number: Largest over layers.
        num_above: Sum over layers.
        pac_bayes_complexity: Of the summed trace.
        dimension: Sum over layers.
    """

    layers: dict[str, LayerCapacity]
    trace: float
    log_determinant: float
    mean_effective_rank: float
    largest_condition_number: float
    num_above: int
    pac_bayes_complexity: float
    dimension: int


def capacity_metrics(
    bases: Mapping[str, LayerBasis],
    *,
    num_examples: int,
    damping: float = 0.0,
    threshold: float = 1e-8,
    max_bytes: int = 1 << 28,
) -> ModelCapacity:
    r"""Capacity of every layer and of the model, in float64.

    Args:
        bases: Of :func:`decompose_factors`.
        num_examples: $n \ge 1$ of the PAC-Bayes complexity: a parameter, because the batch that
            the factors are from need not be the data set.
        damping: $\delta \ge 0$ inside the logarithm.
        threshold: What counts as above zero.
        max_bytes: The memory guard: products $\alpha_i \gamma_j$ are formed so many bytes at a
            time (one $\alpha$ at the least), never the whole block of a large layer.

    Raises:
        ValueError: an argument out of range.
    """
    if num_examples < 1 or damping < 0 or max_bytes < 1:
        raise ValueError(
            "expected num_examples >= 1, damping >= 0 and max_bytes >= 1, got "
            f"{num_examples}, {damping} and {max_bytes}"
        )
    layers = {
        name: _layer(basis, num_examples, damping, threshold, max_bytes)
        for name, basis in bases.items()
    }
    every = list(layers.values())
    trace = math.fsum(layer.trace for layer in every)
    return ModelCapacity(
        layers=layers,
        trace=trace,
        log_determinant=math.fsum(layer.log_determinant for layer in every),
        mean_effective_rank=math.fsum(layer.effective_rank for layer in every) / len(every),
        largest_condition_number=max(layer.condition_number for layer in every),
        num_above=sum(layer.num_above for layer in every),
        pac_bayes_complexity=math.sqrt(trace / num_examples),
        dimension=sum(layer.dimension for layer in every),
    )


def _layer(
    basis: LayerBasis, num_examples: int, damping: float, threshold: float, max_bytes: int
) -> LayerCapacity:
    a, g = (spectrum.raw_values.double() for spectrum in (basis.a, basis.g))
    trace = squares = log_determinant = 0.0
    num_above = dimension = 0
    smallest, largest = math.inf, 0.0
    for products in _products(a, g, basis.bias == "separate", max_bytes):
        trace += float(products.sum())
        squares += float(products.square().sum())
        log_determinant += float((products + damping).log().sum())
        num_above += int((products > threshold).sum())
        smallest, largest = (
            min(smallest, float(products.min())),
            max(largest, float(products.max())),
        )
        dimension += products.numel()
    return LayerCapacity(
        trace=trace,
        log_determinant=log_determinant,
        effective_rank=trace**2 / squares if squares else 0.0,
        condition_number=largest / smallest if smallest else math.inf,
        num_above=num_above,
        num_above_a=int((a > threshold).sum()),
        num_above_g=int((g > threshold).sum()),
        pac_bayes_complexity=math.sqrt(trace / num_examples),
        dimension=dimension,
    )


def _products(
    a: torch.Tensor, g: torch.Tensor, separate_bias: bool, max_bytes: int
) -> Iterator[torch.Tensor]:
    """All eigenvalues of a block: of each group the products, and G alone for its bias."""
    for alpha, gamma in zip(a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1]), strict=True):
        at_once = max(1, max_bytes // (8 * len(gamma)))
        for some in alpha.split(at_once):
            yield some[:, None] * gamma
        if separate_bias:
            yield gamma
