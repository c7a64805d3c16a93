"""Loss of a fine-tuning run, and the adapter's nonlinearity over its updates, as panels."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxkfac.lslora import Nonlinearity
from jaxkfac.report._curve_panels import driven_panels
from jaxkfac.report._families import joined
from jaxkfac.report._finetune_records import FinetuneRecords, FourierRecord
from jaxkfac.report._panels import Axis, Line, panel_html, panels_html

_COLORS = ("a", "adamw", "diagonal", "g", "violet", "olive")


def loss_panels_html(records: FinetuneRecords) -> str:
    """Loss of each update, its running mean, and that of validation; then what drove them."""
    updates = range(1, len(records.losses) + 1)
    lines = [
        Line("one update", updates, records.losses, "a", faint=True),
        Line("training", updates, running_mean(records.losses), "a"),
    ]
    legend = [("a", "training")]
    held = [(e.step, e.loss) for e in records.exams if e.loss is not None]
    if held:
        steps, losses = zip(*held)
        lines.append(Line("validation", steps, losses, "adamw"))
        legend.append(("adamw", "validation"))
    panel = panel_html("Loss, by updates", lines, Axis("updates"), Axis("nats per learnt token"))
    return panels_html([panel, *driven_panels({"finetune": records})], legend=legend)


def nonlinearity_panels_html(records: Sequence[FourierRecord], phi: Nonlinearity) -> str:
    """Deviation, nonlinearity, sigma and saturation of each layer, then its coefficients."""
    start = ", ".join(f"{c:g}" for c in phi.initial)
    titles = {
        "deviation": f"Deviation: mean |c − [{start}]|",
        "nonlinearity": f"Nonlinearity: {phi.strength_formula.partition(',')[0]}",
        "sigma": "σ",
        "saturated": f"Saturated: part with {phi.saturated_formula.partition(',')[0]}",
    }
    panels = []
    for name, title in titles.items():
        series = {
            layer: [np.asarray(r.layers[layer][name]) for r in records]
            for layer in records[0].layers
            if all(r.layers[layer].get(name) is not None for r in records)
        }
        panels.append(_panel(title, records, series))
    for number, start in enumerate(phi.initial):
        series = {
            layer: [np.asarray(r.layers[layer]["coefficients"])[:, number] - start for r in records]
            for layer in records[0].layers
        }
        panels.append(_panel(f"c{number} − {start:g}", records, series))
    legend = [(color, joined([layer])) for layer, color in _colors(records)]
    return panels_html(panels, legend=legend)


def _panel(
    title: str, records: Sequence[FourierRecord], series: dict[str, list[np.ndarray]]
) -> str:
    """Means over a layer's slices; faint, where it has several, the least and the largest."""
    steps, lines = [r.step for r in records], []
    for layer, color in _colors(records):
        if layer not in series:
            continue
        label, values = joined([layer]), series[layer]
        if values[0].size > 1:
            for word, of in (("least", np.min), ("largest", np.max)):
                ends = [float(of(x)) for x in values]
                lines.append(Line(f"{label}, {word}", steps, ends, color, faint=True))
        lines.append(Line(label, steps, [float(x.mean()) for x in values], color))
    return panel_html(title, lines, Axis("updates"), Axis(""))


def _colors(records: Sequence[FourierRecord]) -> Iterator[tuple[str, str]]:
    for i, layer in enumerate(records[0].layers):
        yield layer, _COLORS[i % len(_COLORS)]


def running_mean(losses: Sequence[float], decay: float = 0.85) -> list[float]:
    """An exponential mean, debiased, so that it begins at the first loss."""
    shown, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = decay * total + (1 - decay) * loss, decay * weight + (1 - decay)
        shown.append(total / weight)
    return shown
