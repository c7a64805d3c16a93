"""A nonlinearity for an adapter that was trained without one."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._activation import EPSILON
from jaxkfac.lslora._adapter import Adapters, only_adapters
from jaxkfac.lslora._config import Config
from jaxkfac.lslora._fourier import FOURIER


def as_fourier(
    adapters: Adapters,
    config: Config,
    *,
    sigma: float,
    fourier_placement: Literal["output", "bottleneck"] = "output",
) -> tuple[Adapters, Config]:
    r"""Plain LoRA with a nonlinearity that can be trained, and that starts close to linear.

    $\varphi(z) = \sigma \tanh(z / \sigma) = z - z^3 / 3\sigma^2 + \ldots$: the relative error is
    $(z/\sigma)^2 / 3$, below float32's rounding for $\sigma > 3000\,|z|$, where $\varphi$ has
    also next to nothing to learn from. The coefficients start at $[0, \sigma + 10^{-6}, 0, 0]$:
    ``fourier_loss``, the distance from $[0, 1, 0, 0]$, is then large, and pulls at $c_1$.

    Args:
        adapters: Plain LoRA; from :func:`load`, for example.
        config: Its settings.
        sigma: First $\sigma$, in units of $z$: several times its root mean square.
        fourier_placement: See :class:`Config`.

    Returns:
        ``(adapters, config)``.

    Raises:
        ValueError: the adapters have a nonlinearity already, or a sigma that is not positive.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> plain = {"kernel": lslora.Adapter(jnp.ones((3, 2)), jnp.ones((2, 3)), None, None)}
        >>> config = lslora.Config(rank=2, fourier_placement="none")
        >>> adapters, config = lslora.as_fourier(plain, config, sigma=8.0)
        >>> adapters["kernel"].coefficients.shape, config.fourier_placement
        ((4,), 'output')
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma={sigma}: expected a positive number")
    nonlinear = [name for name, x in only_adapters(adapters).items() if not x.is_linear]
    if nonlinear:
        raise ValueError(f"{', '.join(nonlinear)} have a nonlinearity already")
    out = dict(adapters)
    for name, adapter in only_adapters(adapters).items():
        stack, wide = adapter.a.shape[:-2], statistics_dtype(adapter.a.dtype)
        first = jnp.asarray([c * (sigma + EPSILON) for c in FOURIER.initial], wide)
        out[name] = adapter._replace(
            coefficients=jnp.broadcast_to(first, (*stack, *first.shape)),
            sigma=jnp.full(stack, sigma, wide),
        )
    new = dataclasses.replace(
        config,
        nonlinearity=FOURIER.name,
        fourier_placement=fourier_placement,
        init_sigma=sigma,
    )
    return out, new
