"""Recompute a block's activations in the backward pass instead of keeping them."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass, non-reentrantly.

    Non-reentrant recomputation stops as soon as the last needed activation exists, needs no
    input that requires a gradient, and lets hooks see the graph that is differentiated.
    """

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)
