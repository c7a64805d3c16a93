"""Kronecker factors of a PyTorch model, from hooks and one backward pass."""

from torch_ref.factors._average import debias, update_average, zeros_like
from torch_ref.factors._collect import Loss, collect_factors, stream_factors, to_host
from torch_ref.factors._layers import (
    LayerGradient,
    find_layers,
    read_gradients,
    write_gradients,
)
from torch_ref.factors._likelihoods import Bernoulli, Categorical, Gaussian, fisher_loss
from torch_ref.factors._pool import pool_factors
from torch_ref.factors._scale import to_mean_scale, to_sum_scale
from torch_ref.factors._statistics import LayerFactors, form_factors

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "LayerFactors",
    "LayerGradient",
    "Loss",
    "collect_factors",
    "debias",
    "find_layers",
    "fisher_loss",
    "form_factors",
    "pool_factors",
    "read_gradients",
    "stream_factors",
    "to_host",
    "to_mean_scale",
    "to_sum_scale",
    "update_average",
    "write_gradients",
    "zeros_like",
]
