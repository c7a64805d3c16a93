"""The function that each adapter has learnt."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkfac._checks import named
from jaxkfac.lslora import Adapter, find_nonlinearity
from jaxkfac.plot._style import MUTED, SIDES, drawing


def nonlinearities(
    adapters: Mapping[str, Any],
    *,
    nonlinearity: str = "fourier",
    width: float = 3.0,
    ax: Any = None,
) -> Any:
    r"""Draw $\varphi(u)$ of every layer, slices of a stack one by one.

    Args:
        adapters: ``{layer: Adapter}``, from ``jk.lslora.init``, ``load`` or a training.
        nonlinearity: Name of the one that they have; ``config.nonlinearity``.
        width: $u = z / \sigma$ from minus this to this.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes; dashed is the function that an adapter begins with.

    Raises:
        TypeError: ``adapters`` holds no adapter with a nonlinearity.
        ValueError: no nonlinearity has this name.
        ImportError: matplotlib is not installed.
    """
    if not isinstance(adapters, Mapping):
        raise TypeError(
            "adapters: expected {layer: Adapter}, from jk.lslora.init or load, got "
            f"{named(adapters)}"
        )
    chosen = [x for x in adapters.values() if isinstance(x, Adapter)]
    learnt = [x.coefficients for x in chosen if x.coefficients is not None]
    if not learnt:
        raise TypeError("adapters: expected some with a nonlinearity, got none (plain LoRA)")
    phi = find_nonlinearity(nonlinearity)
    u = jnp.linspace(-width, width, 201)
    x = phi.argument(u)

    def values(coefficients: Any) -> np.ndarray:
        return np.asarray(phi.apply(x, [jnp.asarray(c, u.dtype) for c in coefficients]))

    with drawing(ax) as axes:
        for coefficients in learnt:
            for row in np.asarray(coefficients).reshape(-1, len(phi.initial)):
                axes.plot(u, values(row), color=SIDES["A"], alpha=0.5, linewidth=0.9)
        start = values(phi.initial)
        axes.plot(u, start, color=MUTED, linestyle=(0, (4, 3)), label="at the start")
        axes.set(xlabel="u = z / σ", ylabel="φ(u)")
        axes.legend()
    return axes
