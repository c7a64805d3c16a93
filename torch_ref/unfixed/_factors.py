"""Collecting factors, with the documented faults."""

from typing import Any

import torch
from torch import nn

from torch_ref.factors import LayerFactors, Loss, find_layers, form_factors, to_host

OPTIONS = {"sharing": "expand", "bias": "joint", "mask": None, "gram_dtype": None}


def collect_retaining_graph(model: nn.Module, loss: Loss, batch: Any) -> dict[str, LayerFactors]:
    """Fault: the graph is retained, and every input and gradient kept to the end of the pass.

    Hooks stay if the pass fails, and the parameters' gradients stay in any case.
    Fixed: :func:`torch_ref.factors.collect_factors`.
    """
    inputs, gradients = {}, {}

    def forward_hook(name):
        def hook(module, args, output):
            inputs[name] = args[0]
            output.register_hook(lambda gradient: gradients.__setitem__(name, gradient))

        return hook

    modules = find_layers(model)
    handles = [m.register_forward_hook(forward_hook(name)) for name, m in modules.items()]
    value = loss(model, batch)
    value.backward(retain_graph=True)
    factors = {}
    with torch.no_grad():
        for name, module in modules.items():
            made = form_factors(name, module, inputs[name], gradients[name], **OPTIONS)
            factors[name] = LayerFactors(
                to_host(made.a, None), to_host(made.g, None), made.rows, made.bias
            )
    for handle in handles:
        handle.remove()
    return factors


def collect_on_device(model: nn.Module, loss: Loss, batch: Any) -> dict[str, LayerFactors]:
    """Fault: the factors of all layers stay on the device.

    Fixed: :func:`torch_ref.factors.collect_factors`, which moves each when it is formed.
    """
    factors = {}

    def forward_hook(name):
        def hook(module, args, output):
            held = [args[0].detach()]

            @torch.no_grad()
            def output_hook(gradient):
                factors[name] = form_factors(name, module, held.pop(), gradient, **OPTIONS)

            output.register_hook(output_hook)

        return hook

    modules = find_layers(model)
    handles = [m.register_forward_hook(forward_hook(name)) for name, m in modules.items()]
    try:
        loss(model, batch).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return {name: factors[name] for name in modules}


def to_host_converted_first(factor: torch.Tensor) -> torch.Tensor:
    """Fault: a float32 copy is made on the device, and twice the bytes are sent.

    Fixed: :func:`torch_ref.factors.to_host`.
    """
    return factor.float().cpu()
