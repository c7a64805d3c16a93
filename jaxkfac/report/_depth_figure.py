"""Capacity over depth, a panel for each measure and a line for each layer."""

from jaxkfac.report._depth import DepthStack
from jaxkfac.report._style import FIGURE_STYLE, svg_bytes

_MEASURES = {
    "entropy_rank": "entropy rank",
    "participation_ratio": "participation ratio",
    "trace": "trace",
}


def depth_figure(stack: DepthStack) -> bytes:
    """Entropy rank, participation ratio and trace of each layer, from the first block to the last.

    Returns:
        The figure as SVG.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(9.2, 3.2), layout="constrained")
        axes = figure.subplots(1, len(_MEASURES))
        marker = "o-" if stack.depth <= 40 else "-"
        for axis, (measure, title) in zip(axes, _MEASURES.items(), strict=True):
            for name, records in stack.layers.items():
                values = [max(getattr(record, measure), 1e-30) for record in records]
                axis.plot(range(stack.depth), values, marker, markersize=2.5, label=name)
            axis.set_yscale("log")
            axis.set_title(title)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.set_xlabel("block")
            axis.set_axisbelow(True)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=4)
        return svg_bytes(figure)
