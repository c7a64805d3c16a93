"""Loss of a fine-tuning run, and the adapter's nonlinearity over its updates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkfac.lslora import Nonlinearity
from jaxkfac.report._families import joined
from jaxkfac.report._finetune_records import FinetuneRecords, FourierRecord
from jaxkfac.report._style import FIGURE_STYLE, INK, RULE, svg_bytes

_COLORS = ("#1f5a92", "#c8752d", "#4d7358", "#8a3b52", "#6d5f9c", "#7a6a3f")


def finetune_loss_figure(records: FinetuneRecords) -> bytes:
    """Each update's loss, its running mean, and the validation loss where there is one."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(9.2, 3.0), layout="constrained")
        axis = figure.subplots()
        steps = np.arange(len(records.losses)) + 1
        axis.plot(steps, records.losses, color=_COLORS[0], alpha=0.3, linewidth=0.8)
        axis.plot(steps, _running_mean(records.losses), color=_COLORS[0], label="training")
        held = [(e.step, e.loss) for e in records.exams if e.loss is not None]
        if held:
            axis.plot(*zip(*held), color=_COLORS[1], marker="o", markersize=3, label="validation")
            axis.legend(loc="upper right")
        axis.set(xlabel="updates", ylabel="loss (nats per learnt token)")
        axis.set_ylim(bottom=0)
        axis.grid(color=RULE)
        return svg_bytes(figure)


def fourier_figure(records: Sequence[FourierRecord], phi: Nonlinearity) -> bytes:
    """Deviation, nonlinearity, sigma and saturation of each layer over the updates.

    Lines are means over a layer's slices, bands run from the least to the largest.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    start = ", ".join(f"{c:g}" for c in phi.initial)
    panels = {
        "deviation": f"deviation: mean |c − [{start}]|",
        "nonlinearity": f"nonlinearity: {phi.strength_formula.partition(',')[0]}",
        "sigma": "σ",
        "saturated": f"saturated: part with {phi.saturated_formula.partition(',')[0]}",
    }
    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(9.2, 5.2), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True).flat
        for axis, (name, title) in zip(axes, panels.items()):
            for color, layer in zip(_cycled(len(records[0].layers)), records[0].layers):
                series = _series(records, layer, name)
                if series is not None:
                    _band(axis, [r.step for r in records], series, color, joined([layer]))
            axis.set_title(title)
            axis.grid(color=RULE)
        figure.axes[0].legend(loc="upper left")
        for axis in figure.axes[2:]:
            axis.set_xlabel("updates")
        return svg_bytes(figure)


def coefficients_figure(records: Sequence[FourierRecord], phi: Nonlinearity) -> bytes:
    """The coefficients of each layer over the updates, less where they started."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(9.2, 2.6), layout="constrained")
        axes = figure.subplots(1, len(phi.initial), sharex=True, sharey=True, squeeze=False)[0]
        for number, (axis, start) in enumerate(zip(axes, phi.initial)):
            for color, layer in zip(_cycled(len(records[0].layers)), records[0].layers):
                series = [
                    np.asarray(r.layers[layer]["coefficients"])[:, number] - start for r in records
                ]
                _band(axis, [r.step for r in records], series, color, joined([layer]))
            axis.axhline(0.0, color=INK, linewidth=0.6)
            axis.set_title(f"c{number} − {start:g}")
            axis.set_xlabel("updates")
            axis.grid(color=RULE)
        return svg_bytes(figure)


def _series(records: Sequence[FourierRecord], layer: str, name: str) -> list[np.ndarray] | None:
    found = [r.layers[layer].get(name) for r in records]
    return None if any(x is None for x in found) else [np.asarray(x) for x in found]


def _band(
    axis: Any, steps: Sequence[int], series: Sequence[np.ndarray], color: str, label: str
) -> None:
    axis.plot(steps, [x.mean() for x in series], color=color, label=label)
    low, high = [x.min() for x in series], [x.max() for x in series]
    axis.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)


def _cycled(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]


def _running_mean(losses: Sequence[float], decay: float = 0.85) -> list[float]:
    """An exponential mean, debiased, so that it begins at the first loss."""
    shown, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = decay * total + (1 - decay) * loss, decay * weight + (1 - decay)
        shown.append(total / weight)
    return shown
