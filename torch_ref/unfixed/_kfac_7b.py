"""Kronecker factors and their eigenvalues, as the document on a 7B model had them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_ref.factors import LayerFactors, Loss, find_layers, form_factors
from torch_ref.factors import to_host as moved_to_host


def collect(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    retain_graph: bool,
    to_host: bool,
    cleanup: bool,
) -> dict[str, LayerFactors]:
    """Keep every layer's input and output gradient to the end of the pass, then form all factors.

    A loop over the layers forms a layer's factors, drops its input and gradient, and empties the
    cache at every eighth layer. Before: ``retain_graph=True, to_host=False, cleanup=False``;
    after: the other way round. The factors are those of
    :func:`torch_ref.factors.collect_factors`, which forms them while the pass runs.

    Claims: ``kfac-7b/factors-on-device``, ``kfac-7b/retained-graph``, ``kfac-7b/no-cleanup``,
    ``kfac-7b/cache-in-loop``.

    Args:
        model: With trainable layers of :func:`torch_ref.factors.find_layers`, each used once.
        loss: ``loss(model, batch)``, a mean over loss terms.
        batch: Handed to ``loss``.
        retain_graph: Of the backward pass. It holds what autograd saved and no hook has: with
            tanh or ReLU nothing but the loss's own, with GELU each of its inputs. All goes with
            the loss when this call ends.
        to_host: Move each factor to the CPU as it is formed and make it float32 there. Otherwise
            factors stay on the model's device in its dtype.
        cleanup: At the end, failed or not, drop the parameters' gradients, whatever inputs and
            gradients are left, and the cache.
    """
    inputs: dict[str, torch.Tensor] = {}
    output_gradients: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module, args, output):
            inputs[name] = args[0].detach()
            output.register_hook(lambda gradient: output_gradients.update({name: gradient}))

        return hook

    modules = find_layers(model)
    handles = [m.register_forward_hook(keep(name)) for name, m in modules.items()]
    factors = {}
    try:
        value = loss(model, batch)
        value.backward(retain_graph=retain_graph)
        with torch.no_grad():
            for position, (name, module) in enumerate(modules.items()):
                made = _form(name, module, inputs[name], output_gradients[name])
                if to_host:
                    a, g = (moved_to_host(side, None) for side in (made.a, made.g))
                    made = LayerFactors(a, g, made.rows, made.bias)
                factors[name] = made
                del inputs[name], output_gradients[name]
                if position % 8 == 0:
                    _empty_cache()
    finally:
        for handle in handles:
            handle.remove()
        if cleanup:
            model.zero_grad(set_to_none=True)
            inputs.clear()
            output_gradients.clear()
            _empty_cache()
    return factors


def host_eigenvalues(
    factors: Mapping[str, LayerFactors],
    *,
    move_first: bool,
    required_bytes: Callable[[int], int] | None = None,
    free_bytes: int | None = None,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Eigenvalues of A and G of every layer, in float32 on the CPU.

    Before: ``move_first=False``, which makes a float32 factor on the device and sends it; no
    guard. After: ``move_first=True``, and a guard that gives up on all layers. This package goes
    to the CPU instead of giving up: :func:`torch_ref.linalg.decompose`.

    Claims: ``kfac-7b/convert-then-move``, ``kfac-7b/workspace``.

    Args:
        factors: On any device.
        move_first: ``factor.cpu().float()`` rather than ``factor.float().cpu()``.
        required_bytes: The guard: the workspace that A of n rows is said to need, in bytes.
        free_bytes: The guard's other side; ``None`` asks the device, and without CUDA there is
            no guard.

    Returns:
        ``{layer: (of A, of G)}``, ascending; empty where more than half of the free bytes would
        be needed for some A.
    """
    if free_bytes is None and torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
    if required_bytes is not None and free_bytes is not None:
        largest = max(required_bytes(layer.a.shape[-1]) for layer in factors.values())
        if largest > free_bytes * 0.5:
            return {}

    def eigenvalues(factor: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(factor.cpu().float() if move_first else factor.float().cpu())

    return {name: (eigenvalues(layer.a), eigenvalues(layer.g)) for name, layer in factors.items()}


def _form(
    name: str, module: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor
) -> LayerFactors:
    return form_factors(
        name,
        module,
        inputs,
        gradient,
        sharing="expand",
        bias="joint",
        mask=None,
        gram_dtype=None,
    )


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
