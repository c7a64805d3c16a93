"""Eigenvalues of every factor, over their rank."""

from typing import Any

import numpy as np

from jaxkfac._checks import instance_of
from jaxkfac.curvature import Eigenbases
from jaxkfac.interception import selector
from jaxkfac.plot._style import SIDES, drawing


def spectra(bases: Eigenbases, *, layers: str | None = None, ax: Any = None) -> Any:
    """Draw the eigenvalues of each factor as decomposed, the largest first.

    One line for each slice of a stack. Values that are not positive are left out.

    Args:
        bases: From ``jk.eigendecompose``; ``vectors=False`` is enough.
        layers: Full-match pattern of the layers; ``None`` is all.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes, both logarithmic.

    Raises:
        TypeError: ``bases`` are no ``Eigenbases``.
        UnknownLayerError: ``layers`` matches nothing.
        ImportError: matplotlib is not installed.
    """
    instance_of("bases", bases, Eigenbases, "from jk.eigendecompose(factors)")
    chosen = selector(layers, list(bases))
    with drawing(ax) as axes:
        named: set[str] = set()
        for layer in bases.layers:
            if layer.name not in chosen:
                continue
            basis: Any = bases[layer.name]
            if layer.is_diagonal:
                values = np.asarray(basis.raw_diagonal, np.float64)
                stack = values.shape[: len(layer.stack)]
                sides = {"diagonal": values.reshape(*stack, -1)}
            else:
                sides = {
                    "A": np.asarray(basis.a_raw_values, np.float64),
                    "G": np.asarray(basis.g_raw_values, np.float64),
                }
            for side, values in sides.items():
                for row in values.reshape(-1, values.shape[-1]):
                    row = np.sort(row)[::-1]
                    label = None if side in named else side
                    named.add(side)
                    ranks = np.arange(1, len(row) + 1)
                    drawn = np.where(row > 0, row, np.nan)
                    marker = "." if len(row) == 1 else None
                    style = {"color": SIDES[side], "alpha": 0.6, "linewidth": 0.9}
                    axes.plot(ranks, drawn, marker=marker, label=label, **style)
        axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue")
        axes.legend()
    return axes
