"""How far each adapter's nonlinearity is from its first form, and from linear."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._display import short_repr
from jaxkfac.interception import Site
from jaxkfac.lslora._activation import over_width
from jaxkfac.lslora._adapter import Adapters, nonlinearities
from jaxkfac.lslora._attach import Adapted
from jaxkfac.lslora._branch import Branch
from jaxkfac.lslora._fourier import FOURIER
from jaxkfac.lslora._measure import Statistic, measure
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._registry import find_nonlinearity


class Diagnosis(NamedTuple):
    r"""The nonlinearity of one layer's adapter; leading axes are the layer's stack.

    What is said of tanh is so for the Fourier nonlinearity; others say their own.

    Attributes:
        coefficients: $c_0 \ldots c_3$.
        sigma: $\sigma$.
        deviation: Mean of $|c - [0, 1, 0, 0]|$, the distance from where they started.
        nonlinearity: $|c_2| + |c_3|$. Zero still leaves a tanh.
        saturated: Fraction of a batch's values with $|\hat x| > 0.95$, where tanh has lost nine
            tenths of its slope; ``None`` without a batch.
    """

    coefficients: Float[Array, "*stack k"]
    sigma: Float[Array, "*stack"]
    deviation: Float[Array, "*stack"]
    nonlinearity: Float[Array, "*stack"]
    saturated: Float[Array, "*stack"] | None = None

    __repr__ = short_repr


def diagnose(
    adapters: Adapters,
    adapted: Adapted | None = None,
    params: PyTree = None,
    inputs: Any = None,
    *,
    nonlinearity: str | None = None,
) -> dict[str, Diagnosis]:
    """Numbers of every layer's nonlinearity, as arrays on the device.

    Args:
        adapters: One adapter's tree; plain LoRA has nothing to diagnose.
        adapted: From :func:`attach`, for the saturated fraction.
        params: The base model, likewise.
        inputs: A batch, likewise: one backward pass over it.
        nonlinearity: Its name. That of ``adapted`` by default, and without it ``"fourier"``.

    Returns:
        ``{layer: Diagnosis}``.

    Raises:
        ValueError: the batch is empty, or the coefficients are of another nonlinearity.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([0.0, 1, -0.5, 0]), jnp.array(1.0))
        >>> float(lslora.diagnose({"kernel": adapter})["kernel"].nonlinearity)
        0.5
    """
    if nonlinearity is None:
        nonlinearity = FOURIER.name if adapted is None else adapted.config.nonlinearity
    phi = find_nonlinearity(nonlinearity)
    own, found = nonlinearities(adapters), {}
    for name, (c, sigma) in own.items():
        phi.check(c.shape, f"layer {name!r}")
        found[name] = Diagnosis(
            coefficients=c,
            sigma=sigma,
            deviation=jnp.abs(c - phi.first(c.dtype)).mean(-1),
            nonlinearity=phi.strength(c),
        )
    if adapted is None or not own:
        return found
    zeros = {n: jnp.zeros(sigma.shape, jnp.float32) for n, (_, sigma) in own.items()}
    like = {n: {"saturated": z, "count": z} for n, z in zeros.items()}
    sums = measure(adapted, params, adapters, inputs, _saturated(phi), like)
    return {
        name: one._replace(saturated=sums[name]["saturated"] / sums[name]["count"])
        for name, one in found.items()
    }


def _saturated(phi: Nonlinearity) -> Statistic:
    def statistic(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
        sigma, z = site.slots[0]["adapter"].sigma, branch.z
        over = phi.saturated(phi.argument(over_width(sigma, z)))
        total = over.sum(tuple(range(sigma.ndim, z.ndim)), dtype=jnp.float32)
        return {"saturated": total, "count": jnp.full(total.shape, z.size // max(1, total.size))}

    return statistic
