"""The regulariser of the coefficients, whatever their nonlinearity."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.lslora._adapter import Adapters, nonlinearities
from jaxkfac.lslora._bank import Bank
from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._registry import find_nonlinearity


def fourier_loss(adapters: Adapters | Bank) -> Float[Array, ""]:
    r"""Mean over layers of $\frac14 \|c - [0, 1, 0, 0]\|^2$, not yet times ``reg_weight``.

    This is :func:`regulariser` of the Fourier nonlinearity.

    Args:
        adapters: One adapter's tree, or a bank.

    Returns:
        A scalar on the device, in the coefficients' dtype.

    Raises:
        ValueError: no adapter has coefficients, or they are of another nonlinearity.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([2.0, 1, 0, 0]), jnp.array(1.0))
        >>> float(lslora.fourier_loss({"kernel": adapter}))
        1.0
    """
    return regulariser(adapters, FOURIER.name)


def regulariser(adapters: Adapters | Bank, nonlinearity: str) -> Float[Array, ""]:
    """Mean over layers of a nonlinearity's own regulariser, not yet times ``reg_weight``.

    Each slice of a stack (scan, experts) is a layer. Of a bank, the enabled adapters count; plain
    LoRA has no coefficients and does not.

    Args:
        adapters: One adapter's tree, or a bank.
        nonlinearity: Its name: ``config.nonlinearity``.

    Returns:
        A scalar on the device, in the coefficients' dtype.

    Raises:
        ValueError: no adapter has coefficients, or they are of another nonlinearity.
    """
    phi = find_nonlinearity(nonlinearity)
    if isinstance(adapters, Bank):
        adapters.check_nonlinearity(nonlinearity)
    held = adapters.adapters if isinstance(adapters, Bank) else adapters
    distances, weights = [], []
    for name, (c, sigma) in nonlinearities(held).items():
        phi.check(c.shape, f"layer {name!r}")
        distance = phi.regulariser(c)
        distances.append(distance.reshape(-1))
        if isinstance(adapters, Bank):
            on = (adapters.enabled > 0) & jnp.isfinite(sigma)
            weights.append(jnp.broadcast_to(on, distance.shape).astype(c.dtype).reshape(-1))
    if not distances:
        raise ValueError("no adapter has coefficients: plain LoRA has no regulariser")
    if not weights:
        return jnp.concatenate(distances).mean()
    weight = jnp.concatenate(weights)
    return (jnp.concatenate(distances) * weight).sum() / jnp.maximum(weight.sum(), 1)
