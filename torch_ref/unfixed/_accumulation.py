"""A training step, with the documented fault."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def full_batch_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    micro_batches: Sequence[tuple[torch.Tensor, ...]],
) -> float:
    """Fault: the activations of the whole batch are alive at once.

    Fixed: :func:`torch_ref.accumulation.accumulated_training`.
    """
    batch = tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    return float(value.detach())
