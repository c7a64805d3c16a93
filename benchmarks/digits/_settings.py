"""The settings, and which is there first."""

import math
from typing import Any

from jaxkfac.jobs.cli._options import DigitsAdamwOptions, DigitsKfacOptions, Optimizer
from jaxkfac.jobs.report import TARGET_ERROR

CHOOSING, RACING = 100, (0, 1, 2)  # seeds
# What all settings share.
SHARED: dict[str, Any] = {
    "kfac": DigitsKfacOptions(0.0, damping_mode="pi", decay=0.98, weight_decay=1.0),
    "adamw": DigitsAdamwOptions(0.0, b2=0.99, weight_decay=1e-2),
}


def fixed(rate: float, damping: float, every: int, **more: Any) -> dict[str, Any]:
    """K-FAC with given numbers; the bound of the norm is that of the same length of steps."""
    constraint = 80 * rate**2
    numbers = {"learning_rate": rate, "norm_constraint": constraint, "damping": damping}
    return numbers | {"refresh_every": every, **more}


def adaptive(damping: float, every: int) -> dict[str, Any]:
    """K-FAC whose learning rate, momentum and damping follow from the quadratic model."""
    chosen = {"quadratic": True, "adapt_damping": True, "weight_decay": 1e-3}
    return {"damping": damping, "refresh_every": every, **chosen}


SETTINGS: dict[Optimizer, list[dict[str, Any]]] = {
    "adamw": [
        {"learning_rate": rate, "b2": b2}
        for b2 in (0.99, 0.999)
        for rate in (1e-3, 2e-3, 4e-3, 8e-3)
    ],
    "kfac": [
        *(fixed(rate, 3e-4, 5) for rate in (5e-4, 1e-3, 2e-3)),
        fixed(1e-3, 3e-3, 5),
        *(fixed(rate, 3e-4, 20) for rate in (1e-3, 2e-3)),
        fixed(1e-3, 3e-4, 5, adapt_damping=True),
        adaptive(0.1, 5),
    ],
}


def cost(run: dict[str, Any]) -> float:
    """CPU seconds to the target, by the quickest epoch; infinite where it was not reached."""
    epochs = run["epochs"]
    if not epochs or epochs[-1][-1] > TARGET_ERROR:
        return math.inf
    before = [0.0, *(epoch[1] for epoch in epochs[:-1])]
    return len(epochs) * min(epoch[1] - x for epoch, x in zip(epochs, before, strict=True))


def chosen(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The setting that is at the target first."""
    return min(runs, key=cost)["setting"]
