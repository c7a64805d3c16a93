"""LS-LoRA training, as the document on Phi-3 had it."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ref.lslora import FourierParams, adapted_layers

FIRST_COEFFICIENTS = (0.0, 1.0, 0.0, 0.0)


def regulariser(model: nn.Module, *, stack: bool) -> torch.Tensor | float:
    """Mean over all adapters of the coefficients' mean squared distance from the first ones.

    The first coefficients are made once on the CPU, and sent to the device for each adapter.
    Before: ``stack=False``, a sum that begins as a Python float, divided by the count. After:
    ``stack=True``, a list, stacked, and its mean; the first coefficients are still sent for each.
    :func:`torch_ref.lslora.fourier_loss` keeps them on the device.

    Claims: ``phi3-lora/sum``, ``phi3-lora/host-target``.

    Returns:
        A scalar tensor with a graph. Without adapters ``ZeroDivisionError`` before, and after a 0
        on the model's device.
    """
    first = torch.tensor(FIRST_COEFFICIENTS)
    distances = (
        torch.mean((params.weight - first.to(params.weight.device)) ** 2)
        for _, params in _coefficients(model)
    )
    if stack:
        kept = list(distances)
        if not kept:
            return next(model.parameters()).new_zeros(())
        return torch.stack(kept).mean()
    total, count = 0.0, 0
    for distance in distances:
        total += distance
        count += 1
    return total / count


def nonlinearity(params: FourierParams, z: torch.Tensor, *, check: bool) -> torch.Tensor:
    r"""$\varphi(z)$, with coefficients and $\sigma$ brought to the device of ``z`` in every call.

    Before: ``check=False``, ``.to(z.device)`` of both, which returns a parameter itself where it
    is there already. After: ``check=True``, devices are compared, and data that is elsewhere is
    moved for good. :class:`torch_ref.lslora.FourierParams` moves nothing, and computes in float32
    at the least.

    Claim: ``phi3-lora/transfers``.
    """
    leaves = [params.weight, params.sigma]
    if not check:
        leaves = [leaf.to(z.device) for leaf in leaves]
    elif leaves[0].device != z.device:
        for leaf in leaves:
            leaf.data = leaf.data.to(z.device)
    coefficients, sigma = leaves
    u = (z / (sigma.abs() + 1e-6)).tanh()
    turned = math.pi * u
    terms = (torch.ones_like(u), u, turned.sin(), turned.cos())
    return sum(coefficients[k] * term for k, term in enumerate(terms))


def diagnose(model: nn.Module, *, no_grad: bool) -> dict[str, dict[str, Any]]:
    """Read the numbers of every adapter for a log, one ``.item()`` each.

    Before: ``no_grad=False``; graphs are built, and each goes with the tensor that was read.
    After: ``no_grad=True``. :func:`torch_ref.lslora.diagnose` reads once per layer.

    Claim: ``phi3-lora/diagnostics``.

    Returns:
        ``{"layer/adapter": numbers}``: ``deviation``, ``nonlinearity``, ``sigma`` and
        ``coefficients`` as Python numbers.
    """
    found = {}
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        first = torch.tensor(FIRST_COEFFICIENTS)
        for name, params in _coefficients(model):
            from_first = params.weight - first.to(params.weight.device)
            found[name] = {
                "deviation": from_first.abs().mean().item(),
                "nonlinearity": params.weight[2:].abs().sum().item(),
                "sigma": params.sigma.item(),
                "coefficients": params.weight.tolist(),
            }
    return found


def recompute(block: nn.Module, *args: Any, use_reentrant: bool | None = None) -> Any:
    """Call a block whose activations are computed again in the backward pass.

    Before: ``use_reentrant=None``, not said; PyTorch warns, and takes the reentrant way. After:
    ``False``. :class:`torch_ref.memory.Recomputed` is the same as after.

    Claim: ``phi3-lora/reentrant``.
    """
    said = {} if use_reentrant is None else {"use_reentrant": use_reentrant}
    return checkpoint(block, *args, **said)


def save(model: nn.Module, file: Path | str, *, empty_cache: bool) -> None:
    """Write the parameters while the gradients are still held.

    Before: ``empty_cache=False``, while the allocator's cache is held too. After: ``True``.
    :func:`torch_ref.memory.save_after_cleanup` drops the gradients besides.

    Claim: ``phi3-lora/save``.
    """
    if empty_cache and torch.cuda.is_available():
        torch.cuda.empty_cache()
    safetensors.torch.save_model(model, str(file))


def _coefficients(model: nn.Module) -> Iterator[tuple[str, FourierParams]]:
    for layer, module in adapted_layers(model).items():
        for adapter, params in module.fourier_params.items():
            yield f"{layer}/{adapter}", params
