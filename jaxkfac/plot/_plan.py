"""What a training needs on the device, option by option."""

from typing import Any

from jaxkfac._checks import instance_of
from jaxkfac.planning import MemoryPlan
from jaxkfac.plot._style import COLORS, INK, drawing


def plan(plan: MemoryPlan, *, ax: Any = None) -> Any:
    """Draw the bytes on the device of the training as it stands and with each option.

    Rows of which only the largest is there at a time are drawn as that one.

    Args:
        plan: From ``jk.plan_memory``.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes: a bar for each option, its rows stacked, in GiB; the line is what there is.

    Raises:
        TypeError: ``plan`` is no ``MemoryPlan``.
        ImportError: matplotlib is not installed.
    """
    instance_of("plan", plan, MemoryPlan, "from jk.plan_memory(objective, params, batch, ...)")
    estimates = {"as it stands": plan.now, **plan.alone}
    if plan.smallest is not None and len(plan.smallest.options) > 1:
        estimates["the smallest set that fits"] = plan.smallest
    rows = dict.fromkeys(row for x in estimates.values() for row, n in x.at_once.items() if n)
    with drawing(ax, height=1.2 + 0.32 * len(estimates)) as axes:
        left = [0.0] * len(estimates)
        for i, row in enumerate(rows):
            sizes = [x.at_once.get(row, 0) / 2**30 for x in estimates.values()]
            color = COLORS[i % len(COLORS)]
            axes.barh(range(len(sizes)), sizes, left=left, color=color, label=row, height=0.7)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        if plan.usable_bytes < 4 * 2**30 * max(left):  # else the bars would be too small to see
            axes.axvline(plan.usable_bytes / 2**30, color=INK, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(estimates)), list(estimates))
        axes.set(ylim=(len(estimates) - 0.4, -0.6), xlabel="GiB on the device")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return axes
