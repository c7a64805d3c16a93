r"""A first $\sigma$ from data."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from jaxkfac.interception import Site
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._adapter import Adapters, nonlinearities, only_adapters
from jaxkfac.lslora._attach import Adapted
from jaxkfac.lslora._branch import Branch
from jaxkfac.lslora._measure import measure


def calibrate(
    adapted: Adapted, params: PyTree, adapters: Adapters, inputs: Any, *, factor: float = 1.0
) -> Adapters:
    r"""The adapters with $\sigma = $ ``factor`` times the root mean square of $z$ over a batch.

    Args:
        adapted: From :func:`attach`.
        params: The base model.
        adapters: With B other than zero, or with the placement ``"bottleneck"``.
        inputs: A batch.
        factor: Dimensionless; tanh is 24%, 43% and 76% away from linear at factors 1.75, 1, 1/3.

    Returns:
        The same adapters with another $\sigma$ for each slice.

    Raises:
        ValueError: $z$ is zero on the whole batch, so there is nothing to measure.
    """
    out = dict(adapters)
    found = measured_sigmas(adapted, params, adapters, inputs, fresh=False)
    for name, adapter in only_adapters(adapters).items():
        if name in found:
            out[name] = adapter._replace(sigma=factor * found[name])
    return out


def measured_sigmas(
    adapted: Adapted, params: PyTree, adapters: Adapters, inputs: Any, *, fresh: bool
) -> dict[str, Array]:
    r"""Root mean square of $z$ for each slice of each layer with a nonlinearity.

    A fresh adapter of placement ``"output"`` has B = 0 and so z = 0. There it is the root mean
    square of $s\, x A$, which z has once the columns of B have unit length.
    """
    config = adapted.config
    inside = fresh and config.fourier_placement == "output"

    def squares(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
        layer = str(site.uses[0].layer)
        z = branch.inside * config.scaling(layer) if inside else branch.z
        lead = site.slots[0]["adapter"].sigma.ndim
        axes = tuple(range(lead, z.ndim))
        total = jnp.square(z.astype(statistics_dtype(z.dtype))).sum(axes)
        size = z.size // max(1, total.size)
        return {"squares": total, "count": jnp.full(total.shape, size)}

    own = nonlinearities(adapters)
    zeros = {n: jnp.zeros(sigma.shape, sigma.dtype) for n, (_, sigma) in own.items()}
    like = {n: {"squares": z, "count": z} for n, z in zeros.items()}
    sums = measure(adapted, params, adapters, inputs, squares, like)
    out = {}
    for name, found in sums.items():
        out[name] = jnp.sqrt(found["squares"] / found["count"])
        if not isinstance(out[name], Tracer) and not np.all(np.asarray(out[name]) > 0):
            raise ValueError(
                f"layer {name!r}: z is zero on this batch, or no output depends on it, so there "
                "is nothing to measure its sigma from; give init_sigma a number"
            )
    return out
