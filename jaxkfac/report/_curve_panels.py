"""Loss, error, learning rate and gradient norm of runs, over updates and over seconds."""

from collections.abc import Mapping
from typing import Any

from jaxkfac.report._panels import Axis, Line, panel_html, panels_html
from jaxkfac.report._records import RunRecords
from jaxkfac.report._style import OPTIMIZERS


def curve_panels_html(runs: Mapping[str, RunRecords]) -> str:
    """Training loss and test error by updates and by training time, then what drove them."""
    ends = {
        "Training loss": [e.train_loss for run in runs.values() for e in run.epochs],
        "Test error": [],
    }
    panels = []
    for title in ends:
        for axis, what in (("step", "updates"), ("seconds", "training time, s")):
            lines = [line for name, run in runs.items() for line in _lines(name, run, title, axis)]
            unit = "nats" if title == "Training loss" else "%"
            panels.append(
                panel_html(f"{title}, by {what}", lines, Axis(what), Axis(unit, log=True))
            )
    panels += driven_panels(runs)
    legend = [(name, OPTIMIZERS[name][0]) for name in runs]
    return panels_html(panels, legend=legend)


_DRIVEN = (
    ("Learning rate", "learning_rates", False),
    ("Gradient norm", "gradient_norms", True),
)


def _has(runs: Mapping[str, Any], field: str) -> bool:
    return any(getattr(run, field) for run in runs.values())


def _lines(name: str, run: RunRecords, title: str, axis: str) -> list[Line]:
    label, x = OPTIMIZERS[name][0], [getattr(e, axis) for e in run.epochs]
    if title == "Test error":
        y: list[float | None] = [100 * (1 - e.test_accuracy) for e in run.epochs]
        return [Line(label, x, y, name)]
    lines = [Line(label, x, [e.train_loss for e in run.epochs], name)]
    if axis == "step" and run.losses:
        each = Line(f"{label}, one update", range(1, len(run.losses) + 1), run.losses, name)
        lines.insert(0, each._replace(faint=True))
    return lines


def _driven(runs: Mapping[str, Any], title: str, field: str, log: bool) -> str:
    lines = []
    for name, run in runs.items():
        values, last = getattr(run, field), len(run.losses)
        x = list(range(last - len(values) + 1, last + 1))
        color = name if name in OPTIMIZERS else "a"
        lines.append(Line(OPTIMIZERS.get(name, (name,))[0], x, values, color))
    return panel_html(f"{title}, by updates", lines, Axis("updates"), Axis("", log=log))


def driven_panels(runs: Mapping[str, Any]) -> list[str]:
    """Learning rate and gradient norm alone; none for runs that did not record them."""
    return [_driven(runs, *each) for each in _DRIVEN if _has(runs, each[1])]
