"""What PyTorch's CUDA allocator reserves and does not hand out, in a process of its own."""

import os
import subprocess
import sys

# Tensors that grow a little with every step, of which every second is dropped: blocks that were
# freed are always too small for what comes.
PROGRAM = """
import torch
held = []
for step in range(200):
    held.append(torch.empty((step + 50) << 16, dtype=torch.uint8, device="cuda"))
    if step % 2:
        del held[len(held) // 2]
print(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
"""


def reserved_beyond_allocated(*, expandable: bool) -> float:
    """In MiB."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 2**20
