"""Faults that teach something: lessons of this project, in none of the documents."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from torch_ref.lslora import adapted_layers


def full_batch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    micro_batches: Sequence[tuple[torch.Tensor, ...]],
) -> float:
    """One step on the whole batch, with the activations of all its micro-batches alive at once.

    A lesson of this project, in none of the documents: accumulation saves bytes where it cuts
    one batch, as :func:`torch_ref.accumulation.accumulated_training` does.
    """
    batch = tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())


def copy_model(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """Cast and move a deep copy, and so hold the model twice.

    A lesson of this project, in none of the documents: ``copy.deepcopy`` makes the second copy
    that ``Module.to`` never does.
    """
    return copy.deepcopy(model).to(dtype).to(device)


def save_clones(model: nn.Module, file: Path | str) -> None:
    """Clone every tensor before it is written.

    A lesson of this project, in none of the documents: the clones are a second model on the
    device; :func:`torch_ref.memory.save_after_cleanup` makes none there.
    """
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, str(file))


def diagnose_with_graph(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Numbers for a log as tensors with a graph, which live as long as the log does.

    A lesson of this project, in none of the documents: it is keeping the tensor, rather than
    computing it with autograd on, that holds memory.
    """
    found = {}
    for layer_name, layer in adapted_layers(model).items():
        for name, params in layer.fourier_params.items():
            a = params.weight
            found[f"{layer_name}/{name}"] = {
                "deviation": (a - params.first).abs().mean(),
                "nonlinearity": a[2].abs() + a[3].abs(),
            }
    return found
