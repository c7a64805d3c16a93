"""Clipping a factor, with the documented fault."""

import torch


def stabilize_on_device(
    matrix: torch.Tensor, max_condition: float, damping: float, *, device: torch.device | str
) -> torch.Tensor:
    """Fault: decomposed and put together again on the device, whatever is free there.

    Fixed: :func:`torch_ref.linalg.stabilize`.
    """
    values, vectors = torch.linalg.eigh(matrix.to(device))
    floor = (values.max() / max_condition).clamp(min=damping)
    return (vectors @ torch.diag(torch.maximum(values, floor)) @ vectors.mT).cpu()
