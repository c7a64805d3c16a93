"""Validation against steps and against CPU seconds."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.optimizers._method import Method
from benchmarks.optimizers._problem import Problem
from benchmarks.optimizers._record import seed_runs, target
from benchmarks.optimizers._summary import numbers
from jaxkfac.plot import FIGURE_STYLE

COLORS = {
    "adamw": "#c8752d",
    "muon": "#8a3b52",
    "soap": "#b59a2a",
    "lbfgs": "#6b7885",
    "kfac_fixed": "#7ba7d0",
    "kfac_adaptive": "#1f5a92",
    "kfac_jax_fixed": "#a3c49a",
    "kfac_jax_adaptive": "#4d7358",
}


def curves(
    lines: Sequence[Mapping[str, Any]], methods: Mapping[str, Method], problem: Problem
) -> bytes:
    """The median over the seeds of each method, and their range, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(FIGURE_STYLE):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for name, method in methods.items():
            runs = [line for line in seed_runs(lines, method, problem) if not line["error"]]
            for axis, where in zip(axes, ("steps", "cpu_s"), strict=True):
                if runs:
                    x, middle, low, high = _band(runs, where)
                    axis.plot(x, middle, color=COLORS[name], label=method.title)
                    axis.fill_between(x, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
        goal = target(lines, methods["adamw"], problem)
        for axis in axes:
            axis.set(xscale="log", yscale="log")
            if goal is not None:
                axis.axhline(goal, color="#1c2733", linewidth=0.6, linestyle=(0, (4, 3)))
        axes[0].set(xlabel="steps", ylabel=problem.measure)
        axes[1].set(xlabel="CPU seconds in steps")
        axes[1].legend(loc="upper right")
        axes[0].set_title("Lines: medians over the seeds; bands: their range")
        axes[1].set_title("Dashed: AdamW's median at the end of its budget")
        buffer = io.BytesIO()
        # Without a date, the same numbers give the same bytes.
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def _band(runs: Sequence[Mapping[str, Any]], axis: str) -> tuple[np.ndarray, ...]:
    found = [numbers(line, axis) for line in runs]
    first, last = max(x[1] for x, _ in found), min(x[-1] for x, _ in found)
    places = np.geomspace(first, last, 100)
    y = np.stack([np.interp(places, x, y) for x, y in found])
    return places, np.median(y, 0), y.min(0), y.max(0)
