"""Save a model after freeing what saving does not need."""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from torch_ref.memory._release import release_cache


def save_after_cleanup(model: nn.Module, file: Path | str) -> None:
    """Drop gradients, empty the cache, and only then write the parameters.

    Args:
        model: Its gradients are set to ``None``. Of tied parameters the first name is written.
        file: A safetensors file.

    Memory:
        On the CPU one copy of the model, made tensor by tensor; on the device nothing.
    """
    model.zero_grad(set_to_none=True)
    release_cache()
    state: dict[str, torch.Tensor] = {}
    seen = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in seen or tensor.numel() == 0:
            seen.add(place)
            state[name] = tensor.cpu().contiguous()
    safetensors.torch.save_file(state, str(file))
