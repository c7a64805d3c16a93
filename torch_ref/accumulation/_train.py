"""Several micro-batches, one optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that configure_allocator can still be called after importing this room
    import torch
    from torch import nn


def accumulated_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    micro_batches: Iterable[Any],
    *,
    every: int,
    loss_terms: Callable[[Any], int] | None = None,
    clear_cache_every: int | None = None,
) -> Iterator[float]:
    r"""Train with the gradient of ``every`` micro-batches together.

    Each group runs ``(loss / every).backward()`` per micro-batch, then one step. The last group
    may be incomplete: it divides by the micro-batches that it has. With ``loss_terms`` a
    micro-batch weighs its share of the group's terms instead, which is the gradient of the big
    batch also where micro-batches differ; one without any terms is not run.

    Args:
        model: Trained in place.
        optimizer: Over the model's parameters; stepped once per group.
        loss: ``loss(model, micro_batch)``, a mean over loss terms.
        micro_batches: Read one group at a time.
        every: N, micro-batches per step.
        loss_terms: How many terms the loss of a micro-batch is the mean of.
        clear_cache_every: Empty the allocator's cache after so many steps; ``None`` never.

    Yields:
        The group's loss after each step.

    Raises:
        ValueError: ``every`` or ``clear_cache_every`` below 1, or a group without loss terms.
    """
    if every < 1 or (clear_cache_every is not None and clear_cache_every < 1):
        raise ValueError(
            "expected every >= 1 and clear_cache_every >= 1 or None, got "
            f"{every} and {clear_cache_every}"
        )
    for step, group in enumerate(_groups(micro_batches, every), start=1):
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro_batch, weight in zip(group, _weights(group, loss_terms)):
            if weight == 0:
                continue  # its mean is 0 / 0, and NaN times a weight of 0 is NaN
            scaled = loss(model, micro_batch) * weight
            scaled.backward()
            total = total + scaled.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clear_cache_every is not None and step % clear_cache_every == 0:
            _clear_cache()
        yield float(total)


def _groups(micro_batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    stream = iter(micro_batches)
    while group := list(itertools.islice(stream, size)):
        yield group


def _weights(group: list[Any], loss_terms: Callable[[Any], int] | None) -> list[float]:
    if loss_terms is None:
        return [1 / len(group)] * len(group)
    terms = [loss_terms(micro_batch) for micro_batch in group]
    if sum(terms) < 1:
        raise ValueError(f"a group of {len(group)} micro-batches has no loss terms: {terms}")
    return [count / sum(terms) for count in terms]


def _clear_cache() -> None:
    from torch_ref.memory import release_cache

    release_cache()
