"""EKFAC: eigenvalues measured in the eigenbases of the factors, one example after the other."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torch_ref.curvature._bases import LayerBasis
from torch_ref.factors import LayerGradient, read_gradients


class MeasuredValues(NamedTuple):
    """Eigenvalues of one layer's block in the basis of its factors, outputs first.

    Attributes:
        weight: ``(out, in)``, with a joint bias ``(out, in + 1)``; with groups before.
        bias: ``(out,)`` where the bias has a block of its own.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


def measure_eigenvalues(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    examples: Iterable[tuple[Any, int]],
    bases: Mapping[str, LayerBasis],
) -> dict[str, MeasuredValues]:
    r"""Mean squared gradients of single examples, turned into the eigenbases.

    With $\gamma_n$ the gradient of the *sum* of one example's loss terms as a matrix, and T the
    terms of all examples,

    $$ \lambda = \frac{1}{T} \sum_n \bigl( Q_G^\top \gamma_n Q_A \bigr)^{\odot 2}, $$

    the diagonal of the Fisher in the basis of $G \otimes A$: the best one in that basis.

    Args:
        model: Trainable; its gradients are ``None`` afterwards.
        loss: ``loss(model, batch)``, a mean over the loss terms of the batch.
        examples: ``(batch of one example, its number of loss terms)``; one without terms adds
            nothing.
        bases: Of :func:`decompose_factors`; their vectors are used, their values are not.

    Returns:
        ``{module name: eigenvalues}`` on the CPU, on the scale of the sum over terms.

    Raises:
        ValueError: no example has a loss term.

    Example:
        >>> import torch
        >>> from torch_ref.curvature import decompose_factors
        >>> from torch_ref.factors import collect_factors
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.eye(2)
        >>> loss = lambda model, x: model(x).sum() / len(x)
        >>> bases = decompose_factors(collect_factors(model, loss, x))
        >>> measure_eigenvalues(model, loss, [(row[None], 1) for row in x], bases)[""].weight
        tensor([[0.5000, 0.5000]])

    References:
        Thomas George et al., "Fast Approximate Natural Gradient Descent in a
        Kronecker-factored Eigenbasis", 2018.
    """
    modes: dict[str, Literal["joint", "separate"]] = {
        name: "separate" if b.bias == "separate" else "joint" for name, b in bases.items()
    }
    sums: dict[str, list[Any]] = {name: [0.0, None] for name in bases}
    terms = 0
    for batch, count in examples:
        if count == 0:
            continue  # its mean loss is 0 / 0
        terms += count
        model.zero_grad(set_to_none=True)
        (count * loss(model, batch)).backward()
        for name, basis in bases.items():
            gradient = read_gradients(model, {name: basis}, bias=modes[name])[name]
            weight, bias = rotate(gradient, basis)
            sums[name][0] = sums[name][0] + weight.square()
            if bias is not None:
                sums[name][1] = bias.square() + (0 if sums[name][1] is None else sums[name][1])
    model.zero_grad(set_to_none=True)
    if terms == 0:
        raise ValueError("no example has a loss term, so there is no mean")
    return {
        name: MeasuredValues(weight / terms, None if bias is None else bias / terms)
        for name, (weight, bias) in sums.items()
    }


def apply_measured_power(
    gradients: Mapping[str, LayerGradient],
    bases: Mapping[str, LayerBasis],
    measured: Mapping[str, MeasuredValues],
    power: float,
    *,
    damping: float = 0.0,
) -> dict[str, LayerGradient]:
    r"""$Q_G \bigl( (\lambda + \delta)^p \odot Q_G^\top \, \nabla W \, Q_A \bigr) Q_A^\top$.

    Args:
        gradients: Outputs first, on the CPU.
        bases: The eigenvectors.
        measured: Of :func:`measure_eigenvalues`; not clipped.
        power: Any real p.
        damping: $\delta$, added to every eigenvalue.
    """
    applied = {}
    for name, gradient in gradients.items():
        weight, bias = rotate(gradient, bases[name])
        values, bias_values = measured[name]
        weight = weight * (values + damping) ** power
        if bias is not None and bias_values is not None:
            bias = bias * (bias_values + damping) ** power
        applied[name] = rotate(LayerGradient(weight, bias), bases[name], back=True)
    return applied


def rotate(gradient: LayerGradient, basis: LayerBasis, *, back: bool = False) -> LayerGradient:
    """Into the eigenbasis of a layer, or back out of it; on the CPU."""
    q_a, q_g = basis.a.vectors, basis.g.vectors
    if back:
        q_a, q_g = (None if q is None else q.mT for q in (q_a, q_g))
    weight = gradient.weight.detach().cpu()
    bias = None if gradient.bias is None else gradient.bias.detach().cpu()
    if q_g is not None:
        weight = q_g.mT @ weight
        bias = None if bias is None else (q_g.mT @ bias[..., None])[..., 0]
    return LayerGradient(weight if q_a is None else weight @ q_a, bias)
