"""How far each adapter is from tanh, and from linear."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac.interception._rewrite import Site
from jaxkfac.lslora._adapter import IDENTITY, Adapters, nonlinearities
from jaxkfac.lslora._attach import Adapted
from jaxkfac.lslora._branch import Branch
from jaxkfac.lslora._fourier import squashed
from jaxkfac.lslora._measure import measure

SATURATED = 0.95  # |x| above which the slope of tanh, 1 - x^2, is below a tenth


class Diagnosis(NamedTuple):
    r"""The nonlinearity of one layer's adapter; leading axes are the layer's stack.

    Attributes:
        coefficients: $c_0 \ldots c_3$.
        sigma: $\sigma$.
        deviation: Mean of $|c - [0, 1, 0, 0]|$.
        nonlinearity: $|c_2| + |c_3|$. Zero still leaves a tanh.
        saturated: Fraction of a batch's values with $|\hat x| > 0.95$, where tanh has lost nine
            tenths of its slope; ``None`` without a batch.
    """

    coefficients: Float[Array, "*stack 4"]
    sigma: Float[Array, "*stack"]
    deviation: Float[Array, "*stack"]
    nonlinearity: Float[Array, "*stack"]
    saturated: Float[Array, "*stack"] | None = None


def diagnose(
    adapters: Adapters,
    adapted: Adapted | None = None,
    params: PyTree = None,
    inputs: Any = None,
) -> dict[str, Diagnosis]:
    """Numbers of every layer's nonlinearity, as arrays on the device.

    Args:
        adapters: One adapter's tree; plain LoRA has nothing to diagnose.
        adapted: From :func:`attach`, for the saturated fraction.
        params: The base model, likewise.
        inputs: A batch, likewise: one backward pass over it.

    Returns:
        ``{layer: Diagnosis}``.

    Raises:
        ValueError: the batch is empty.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([0.0, 1, -0.5, 0]), jnp.array(1.0))
        >>> float(lslora.diagnose({"kernel": adapter})["kernel"].nonlinearity)
        0.5
    """
    own, found = nonlinearities(adapters), {}
    for name, (c, sigma) in own.items():
        found[name] = Diagnosis(
            coefficients=c,
            sigma=sigma,
            deviation=jnp.abs(c - IDENTITY.astype(c.dtype)).mean(-1),
            nonlinearity=jnp.abs(c[..., 2]) + jnp.abs(c[..., 3]),
        )
    if adapted is None or not own:
        return found
    zeros = {n: jnp.zeros(sigma.shape, jnp.float32) for n, (_, sigma) in own.items()}
    like = {n: {"saturated": z, "count": z} for n, z in zeros.items()}
    sums = measure(adapted, params, adapters, inputs, _saturated, like)
    return {
        name: one._replace(saturated=sums[name]["saturated"] / sums[name]["count"])
        for name, one in found.items()
    }


def _saturated(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
    sigma, z = site.slots[0]["adapter"].sigma, branch.z
    over = jnp.abs(squashed(z, sigma)) > SATURATED
    total = over.sum(tuple(range(sigma.ndim, z.ndim)), dtype=jnp.float32)
    return {"saturated": total, "count": jnp.full(total.shape, z.size // max(1, total.size))}
