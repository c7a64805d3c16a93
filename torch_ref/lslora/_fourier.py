"""The learnable nonlinearity."""

import math

import torch
from torch import nn


class FourierParams(nn.Module):
    r"""$\varphi(z) = a_0 + a_1 \hat x + a_2 \sin \pi\hat x + a_3 \cos \pi\hat x$.

    $\hat x = \tanh(z / (|\sigma| + 10^{-6}))$. The first coefficients, ``[0, 1, 0, 0]``, give
    tanh and not the identity. Computed in float32 at the least: in bfloat16 it is off by 0.012.

    Args:
        init_sigma: First value of $\sigma$.
        device: Of the parameters.
    """

    def __init__(self, init_sigma: float, *, device: torch.device | str | None = None):
        super().__init__()
        first = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device)
        self.weight = nn.Parameter(first.clone())
        self.sigma = nn.Parameter(torch.tensor(float(init_sigma), device=device))
        # Once and on the device, where the regulariser finds it; not part of a checkpoint.
        self.register_buffer("first", first, persistent=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.squashed(z)
        a0, a1, a2, a3 = self.weight.unbind()
        return a0 + a1 * x + a2 * torch.sin(math.pi * x) + a3 * torch.cos(math.pi * x)

    def squashed(self, z: torch.Tensor) -> torch.Tensor:
        r"""$\hat x$."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return torch.tanh(z / (self.sigma.abs() + 1e-6))

    def distance(self) -> torch.Tensor:
        """Mean squared distance of the coefficients from ``[0, 1, 0, 0]``, on the device."""
        return (self.weight - self.first).square().mean()
