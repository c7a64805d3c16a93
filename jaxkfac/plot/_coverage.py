"""Which parameters are in a layer, and how many."""

from typing import Any

from jaxkfac._checks import instance_of
from jaxkfac._text import shortened
from jaxkfac.interception import LayerTable
from jaxkfac.plot._style import MUTED, SIDES, drawing

_COLORS = {"two factors": SIDES["A"], "a diagonal": SIDES["diagonal"], "not covered": MUTED}


def coverage(layers: LayerTable, *, ax: Any = None) -> Any:
    """Draw a bar for each layer, of its parameters, and for each parameter that is in none.

    Args:
        layers: From ``jk.find_layers``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes: parameters to the right, logarithmic, the first layer on top.

    Raises:
        TypeError: ``layers`` is no ``LayerTable``.
        ImportError: matplotlib is not installed.
    """
    instance_of("layers", layers, LayerTable, "from jk.find_layers(fn, params, *args)")
    rows = [
        (x.name, "a diagonal" if x.is_diagonal else "two factors", x.num_parameters)
        for x in layers.layers
    ]
    missing = dict.fromkeys(path for path, _ in layers.uncovered)
    rows += [(path, "not covered", layers.sizes.get(path, 0)) for path in missing]
    with drawing(ax, height=0.8 + 0.2 * max(len(rows), 1)) as axes:
        for kind, color in _COLORS.items():
            places = [i for i, row in enumerate(rows) if row[1] == kind]
            if places:
                sizes = [rows[i][2] for i in places]
                axes.barh(places, sizes, color=color, label=kind, height=0.7)
        axes.set_yticks(range(len(rows)), [shortened(name, 40) for name, *_ in rows])
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="parameters")
        if rows:
            axes.set_xscale("log")
            axes.legend()
    return axes
