"""Each documented fault as it was, for measuring; only the benchmark of the fixes imports it.

The numbers are those of the fixed versions: what differs is bytes and time.
"""

from torch_ref.unfixed._accumulation import full_batch_step
from torch_ref.unfixed._factors import (
    collect_on_device,
    collect_retaining_graph,
    to_host_converted_first,
)
from torch_ref.unfixed._linalg import stabilize_on_device
from torch_ref.unfixed._lslora import (
    TransferringLSLoRALinear,
    diagnose_with_graph,
    fourier_loss_from_host,
)
from torch_ref.unfixed._memory import (
    ReentrantlyRecomputed,
    cast_and_move_always,
    load_then_convert,
    save_without_cleanup,
)

__all__ = [
    "ReentrantlyRecomputed",
    "TransferringLSLoRALinear",
    "cast_and_move_always",
    "collect_on_device",
    "collect_retaining_graph",
    "diagnose_with_graph",
    "fourier_loss_from_host",
    "full_batch_step",
    "load_then_convert",
    "save_without_cleanup",
    "stabilize_on_device",
    "to_host_converted_first",
]
