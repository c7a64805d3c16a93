"""Gradient accumulation, as the document on few-shot training had it."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    batches: Iterable[Any],
    *,
    every: int = 1,
    first: int = 0,
    zero_grad: bool = False,
    clear_cache_every: int | None = None,
) -> list[int]:
    """Backward of ``loss / every`` on each batch, and a step where its number divides by ``every``.

    Before: ``every=1, clear_cache_every=None``. After: ``every=4, clear_cache_every=40``, say, and
    the batches keep their size, so no activation is saved. With ``first=0`` the first step comes
    after one batch and not after ``every`` of them.
    :func:`torch_ref.accumulation.accumulated_training` steps at the end of each group, with
    gradients that begin at zero.

    Claims: ``few-shot/accumulate``, ``few-shot/clear-cache``.

    Args:
        model: Trained in place.
        optimizer: Over its parameters.
        loss: ``loss(model, batch)``, a mean over loss terms.
        batches: One for each backward pass.
        every: N, the divisor of the loss and the distance of two optimizer steps.
        first: The number of the first batch. The document does not state it.
        zero_grad: Set the gradients to ``None`` after each optimizer step. The document shows no
            line that does, before the change or after; without one each step has the sum of all
            gradients so far.
        clear_cache_every: Empty the allocator's cache at each multiple, at 0 too; ``None`` never.

    Returns:
        The numbers of the batches after which the optimizer made a step.
    """
    stepped = []
    for position, batch in enumerate(batches, first):
        (loss(model, batch) / every).backward()
        if position % every == 0:
            optimizer.step()
            stepped.append(position)
            if zero_grad:
                optimizer.zero_grad(set_to_none=True)
        if clear_cache_every is not None and position % clear_cache_every == 0:
            torch.cuda.empty_cache()
    return stepped
