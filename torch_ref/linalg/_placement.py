"""Where an eigendecomposition runs, and what happens when it does not fit."""

import torch


def fits_on_device(matrix: torch.Tensor, free_bytes: int) -> bool:
    """Whether three times the matrix is at most half of the free memory, in bytes.

    The solver needs about three matrices beside the input; the other half stays for what runs
    next to it. A stack counts whole: it is sent, and comes back, in one piece.
    """
    return 3 * matrix.numel() * matrix.element_size() <= free_bytes // 2


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device in bytes; 0 for any other, where nothing is to be gained."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def eigh_where_it_fits(
    matrix: torch.Tensor, device: torch.device | str, *, free: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigendecompose on ``device`` if it fits, else on the CPU; results are on the CPU.

    Args:
        matrix: Symmetric, on the CPU, ``(n, n)`` or a stack of them.
        device: Where to try. Out of memory there is not an error: the CPU does it again.
        free: Free bytes of ``device``; ``None`` asks it.

    Returns:
        Eigenvalues ``(n,)``, ascending, and eigenvectors ``(n, n)`` in columns.
    """
    device = torch.device(device)
    if fits_on_device(matrix, free_bytes(device) if free is None else free):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(device))
            return values.cpu(), vectors.cpu()
        except torch.cuda.OutOfMemoryError:
            pass  # leave the handler first: the exception holds the frames that hold the memory
    values, vectors = torch.linalg.eigh(matrix.cpu())
    return values, vectors
