"""The regulariser and the diagnostics of the coefficients."""

from typing import NamedTuple

import torch
from torch import nn

from torch_ref.lslora._attach import adapted_layers
from torch_ref.lslora._fourier import FourierParams

SATURATED = 0.95


class Diagnosis(NamedTuple):
    r"""The nonlinearity of one adapter in one layer, as plain numbers.

    Attributes:
        coefficients: $a_0 \ldots a_3$.
        sigma: $\sigma$.
        deviation: Mean of $|a - [0, 1, 0, 0]|$.
        nonlinearity: $|a_2| + |a_3|$.
        saturated: Fraction of a batch's values with $|\hat x| > 0.95$; ``None`` without a batch.
    """

    coefficients: tuple[float, float, float, float]
    sigma: float
    deviation: float
    nonlinearity: float
    saturated: float | None = None


def fourier_loss(model: nn.Module) -> torch.Tensor:
    r"""Mean over layers and *active* adapters of $\frac14 \|a - [0, 1, 0, 0]\|^2$.

    Built where the coefficients are, with no synchronisation with the host. Not yet multiplied
    by ``reg_weight``.

    Raises:
        ValueError: no adapter is active, or only plain LoRA.
    """
    distances = [params.distance() for params in _active(model).values()]
    if not distances:
        raise ValueError(
            "no adapter is active that has coefficients; attach one, or set_active(model, name)"
        )
    return torch.stack(distances).mean()


@torch.no_grad()
def diagnose(model: nn.Module, inputs: torch.Tensor | None = None) -> dict[str, Diagnosis]:
    """``{"layer/adapter": numbers}`` of the active adapters, without a graph.

    Args:
        model: With adapters.
        inputs: A batch, for the saturated fraction: one forward pass over it in evaluation
            mode, so without dropout, and running statistics stay as they are.

    Raises:
        ValueError: ``inputs`` reach some of the layers not at all, by name.
    """
    found = {}
    for name, params in _active(model).items():
        a = params.weight
        numbers = torch.stack(
            [*a, params.sigma, (a - params.first).abs().mean(), a[2].abs() + a[3].abs()]
        ).tolist()  # one synchronisation per layer
        found[name] = Diagnosis(tuple(numbers[:4]), *numbers[4:])
    if inputs is None:
        return found
    fractions = _saturated(model, inputs)
    return {name: one._replace(saturated=fractions[name]) for name, one in found.items()}


def _saturated(model: nn.Module, inputs: torch.Tensor) -> dict[str, float]:
    over: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for name, params in _active(model).items():
        seen = over[name] = []

        def see(phi: FourierParams, args: tuple[torch.Tensor], seen: list = seen) -> None:
            seen.append((phi.squashed(args[0]).abs() > SATURATED).flatten())

        hooks.append(params.register_forward_pre_hook(see))
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    if unreached := [name for name, seen in over.items() if not seen]:
        raise ValueError(f"the model does not call {unreached}, so no value there saturates")
    return {name: torch.cat(seen).double().mean().item() for name, seen in over.items()}


def _active(model: nn.Module) -> dict[str, FourierParams]:
    return {
        f"{layer_name}/{adapter}": layer.fourier_params[adapter]
        for layer_name, layer in adapted_layers(model).items()
        for adapter in layer.active
        if adapter in layer.fourier_params
    }
