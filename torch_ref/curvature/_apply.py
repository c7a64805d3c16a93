"""Powers of the Kronecker-factored Fisher, applied to gradients."""

from collections.abc import Mapping

import torch

from torch_ref.curvature._bases import LayerBasis
from torch_ref.factors import LayerGradient


def apply_power(
    gradients: Mapping[str, LayerGradient],
    bases: Mapping[str, LayerBasis],
    power: float,
    *,
    damping: tuple[float, float] = (0.0, 0.0),
) -> dict[str, LayerGradient]:
    r"""$(G + \delta_G)^p \, \nabla W \, (A + \delta_A)^p$ for every layer.

    Negative powers take clipped eigenvalues, others raw ones. A bias with a block of its own
    is multiplied by $(G + \delta_G)^p$.

    Args:
        gradients: Outputs first; see :class:`LayerGradient`. On any device.
        bases: Of the same layers; they stay on the CPU, and one layer's matrices at a time are
            brought to its gradient's device.
        power: Any real p.
        damping: $(\delta_A, \delta_G)$, each in its own factor's units.

    Returns:
        Shapes, dtypes and devices of ``gradients``.

    Raises:
        ValueError: the layers differ, or a shape does not fit, naming the layer.
    """
    if gradients.keys() != bases.keys():
        differ = sorted(gradients.keys() ^ bases.keys())
        raise ValueError(f"gradients and bases differ in the layers {differ}")
    damping_a, damping_g = damping
    applied = {}
    for name, gradient in gradients.items():
        basis = bases[name]
        expected = (basis.g.size, basis.a.size)
        if gradient.weight.shape[-2:] != expected:
            raise ValueError(
                f"layer {name!r}: the gradient has the shape {tuple(gradient.weight.shape)} and "
                f"its factors are for {expected}; read it with the bias mode of the factors"
            )
        a = _on_demand(basis.a.power(power, damping_a), gradient.weight)
        g = _on_demand(basis.g.power(power, damping_g), gradient.weight)
        weight = g @ gradient.weight.to(g.dtype)
        weight = weight * a if basis.a.vectors is None else weight @ a
        bias = gradient.bias
        if bias is not None:
            product = (g @ bias.to(g.dtype)[..., None]).squeeze(-1)
            bias = product.to(bias.dtype)
        applied[name] = LayerGradient(weight.to(gradient.weight.dtype), bias)
    return applied


def natural_gradient(
    gradients: Mapping[str, LayerGradient],
    bases: Mapping[str, LayerBasis],
    *,
    damping: tuple[float, float] = (0.0, 0.0),
) -> dict[str, LayerGradient]:
    r"""$(G + \delta_G)^{-1} \, \nabla W \, (A + \delta_A)^{-1}$ from clipped eigenvalues."""
    return apply_power(gradients, bases, -1.0, damping=damping)


def fisher_vector_product(
    vectors: Mapping[str, LayerGradient], bases: Mapping[str, LayerBasis]
) -> dict[str, LayerGradient]:
    r"""$G \, V \, A$ from raw eigenvalues."""
    return apply_power(vectors, bases, 1.0)


def _on_demand(factor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return factor.to(like.device, torch.promote_types(factor.dtype, like.dtype))
