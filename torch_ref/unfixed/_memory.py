"""Loading, converting, recomputing and saving, with the documented faults."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def load_then_convert(
    build: Callable[[], nn.Module],
    file: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Fault: built in float32, a whole file beside it, and converted afterwards.

    Fixed: :func:`torch_ref.memory.load_once`.
    """
    model = build()
    state = safetensors.torch.load_file(str(file))
    model.load_state_dict(state)
    return cast_and_move_always(model, dtype, device)


def cast_and_move_always(
    model: nn.Module, dtype: torch.dtype, device: torch.device | str
) -> nn.Module:
    """Fault: a converted and moved copy is made even of a model that needs neither.

    Fixed: :func:`torch_ref.memory.cast_once`, :func:`torch_ref.memory.place_once`.
    """
    return copy.deepcopy(model).to(dtype).to(device)


class ReentrantlyRecomputed(nn.Module):
    """Fault: reentrant checkpointing, a backward pass inside the backward pass.

    No gradient without an input that requires one, and a block is always recomputed whole.
    Fixed: :class:`torch_ref.memory.Recomputed`.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=True)


def save_without_cleanup(model: nn.Module, file: Path | str) -> None:
    """Fault: a second copy of the model is made while gradients and the cache are still held.

    Fixed: :func:`torch_ref.memory.save_after_cleanup`.
    """
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(state, str(file))
