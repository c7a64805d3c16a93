"""The Jacobian of a model's outputs, formed row by row, its Gram matrix, and a step with it."""

from collections.abc import Mapping

import torch
from torch.func import functional_call, jacrev


def jacobian(
    model: torch.nn.Module, inputs: torch.Tensor | Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Derivatives of every number of the outputs with respect to all parameters.

    Args:
        model: The model.
        inputs: Its input, or its inputs by name.

    Returns:
        ``(rows, parameters)``: rows in the order of ``outputs.reshape(-1)``, parameters in that of
        ``model.named_parameters()``, each flattened.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def outputs(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, parameters, args, kwargs).reshape(-1)

    # One row at a time, because not every operation has a rule for torch.func.vmap.
    by_name = jacrev(outputs, chunk_size=1)(parameters)
    return torch.cat([x.reshape(len(x), -1) for x in by_name.values()], dim=1)


def gram(model: torch.nn.Module, inputs: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``J @ J.T`` of :func:`jacobian`."""
    rows = jacobian(model, inputs)
    return rows @ rows.T


def spring_direction(
    rows: torch.Tensor,
    residuals: torch.Tensor,
    last: torch.Tensor,
    *,
    damping: float,
    momentum: float,
) -> torch.Tensor:
    r"""The step of SPRING, $\mu \phi + J^\top (J J^\top + \lambda)^{-1} (r - \mu J \phi)$.

    Args:
        rows: The Jacobian of the residuals, ``(rows, parameters)``.
        residuals: ``(rows,)``.
        last: The last step, ``(parameters,)``.
        damping: $\lambda$ over the trace of the Gram matrix.
        momentum: $\mu$.

    Returns:
        What is subtracted from the parameters, ``(parameters,)``.
    """
    matrix = rows @ rows.T
    eye = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    solved = torch.linalg.solve(
        matrix + damping * matrix.trace() * eye, residuals - momentum * rows @ last
    )
    return momentum * last + rows.T @ solved
