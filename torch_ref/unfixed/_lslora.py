"""LS-LoRA, with the documented faults."""

import math

import torch
from torch import nn

from torch_ref.lslora import LSLoRALinear, adapted_layers


class TransferringLSLoRALinear(LSLoRALinear):
    """Fault: adapters wait on the CPU and every call brings them to the input's device.

    Fixed: :class:`torch_ref.lslora.LSLoRALinear`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        result = y
        for name in self.active:
            config = self.configs[name]
            a = self.lora_A[name].weight.to(x.device, copy=True)
            b = self.lora_B[name].weight.to(x.device, copy=True)
            weight = self.fourier_params[name].weight.to(x.device, copy=True)
            sigma = self.fourier_params[name].sigma.to(x.device, copy=True)
            inside = self.lora_dropout[name](x) @ a.mT
            if config.fourier_placement == "output":
                result = result + _phi(config.scaling * (inside @ b.mT), weight, sigma)
            else:
                phi = _phi(inside, weight, sigma).to(inside.dtype)
                result = result + config.scaling * (phi @ b.mT)
        return result.to(y.dtype)


def fourier_loss_from_host(model: nn.Module) -> torch.Tensor:
    """Fault: the target is made on the CPU and sent, for every layer in every step.

    Fixed: :func:`torch_ref.lslora.fourier_loss`.
    """
    distances = []
    for layer in adapted_layers(model).values():
        for name in layer.active:
            weight = layer.fourier_params[name].weight
            target = torch.tensor([0.0, 1.0, 0.0, 0.0]).to(weight.device, weight.dtype)
            distances.append((weight - target).square().mean())
    return torch.stack(distances).mean()


def diagnose_with_graph(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Fault: numbers for a log that hold a graph.

    Fixed: :func:`torch_ref.lslora.diagnose`.
    """
    found = {}
    for layer_name, layer in adapted_layers(model).items():
        for name in layer.active:
            a = layer.fourier_params[name].weight
            target = torch.tensor([0.0, 1.0, 0.0, 0.0]).to(a.device, a.dtype)
            found[f"{layer_name}/{name}"] = {
                "deviation": (a - target).abs().mean(),
                "nonlinearity": a[2].abs() + a[3].abs(),
            }
    return found


def _phi(z: torch.Tensor, weight: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(z.to(torch.promote_types(z.dtype, torch.float32)) / (sigma.abs() + 1e-6))
    a0, a1, a2, a3 = weight.unbind()
    return a0 + a1 * x + a2 * torch.sin(math.pi * x) + a3 * torch.cos(math.pi * x)
