"""The page of the record."""

import math
from typing import Any

from benchmarks.digits._documented import documented_table
from benchmarks.digits._settings import CHOOSING, RACING, SETTINGS, chosen, cost
from jaxkfac.jobs.report import (
    TARGET_ERROR,
    EpochRecord,
    RunRecords,
    at_target,
    interval,
    race_sentence,
)

NAN, LABELS = float("nan"), {"kfac": "K-FAC", "adamw": "AdamW"}


def records(run: dict[str, Any]) -> RunRecords:
    """As a report takes it, with what was measured."""
    epochs = [
        EpochRecord(step, 0, cpu, NAN, NAN, NAN, NAN, loss, 1 - error)
        for step, cpu, loss, error in run["epochs"]
    ]
    return RunRecords([], epochs)


def described(setting: dict[str, Any]) -> str:
    """A setting in words."""
    return ", ".join(
        name.replace("_", " ") + ("" if value is True else f" {value:.3g}")
        for name, value in setting.items()
    )


def settings_table(name: str, runs: list[dict[str, Any]], best: dict[str, Any]) -> list[str]:
    """What each setting needed."""
    head = f"| {LABELS[name]} | updates to {TARGET_ERROR:.0%} | CPU s, of its quickest epoch |"
    lines = [head, "|---|---|---|"]
    for run in runs:
        needed, words = cost(run), described(run["setting"])
        words = f"**{words}**" if run["setting"] == best else words
        step = run["epochs"][-1][0] if run["epochs"] else 0
        found = f"{step} | {needed:.1f}" if math.isfinite(needed) else f"not in {step} | –"
        lines.append(f"| {words} | {found} |")
    return [*lines, ""]


def race_table(racing: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Means over the seeds with intervals, and the sentence."""
    runs = {name: [records(run) for run in found] for name, found in racing.items()}
    head = ["optimizer", f"updates to {TARGET_ERROR:.0%}", "CPU s", "of a run", "training loss",
            "validation error (%)", "test error (%)"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in racing.items():
        cells = [
            *at_target(runs[name]),
            interval([run["epochs"][-1][1] for run in found], ".1f"),
            interval([run["train_loss"] for run in found], ".2g"),
            interval([100 * run["epochs"][-1][-1] for run in found], ".2f"),
            interval([100 * (1 - run["test_accuracy"]) for run in found], ".2f"),
        ]
        lines.append(f"| {LABELS[name]} | {' | '.join(cells)} |")
    sentence = (
        race_sentence(runs).replace(" s (", " CPU s (").replace("in seconds", "in CPU seconds")
    )
    return [*lines, "", sentence]


def page(lines: list[dict[str, Any]]) -> str:
    """The tables."""
    first, shown, racing = lines[0], [], {}
    for name in SETTINGS:
        own = [x for x in lines if x["optimizer"] == name and x["setting"] in SETTINGS[name]]
        choosing = [x for x in own if x["seed"] == CHOOSING]
        best = chosen(choosing)
        shown += settings_table(name, choosing, best)
        racing[name] = [x for x in own if x["seed"] != CHOOSING and x["setting"] == best]
    text = [
        "# The defaults of `jaxkfac train`",
        "",
        f"`{first['command']}`, {first['date']}, jax {first['jax']}, {first['cores']} CPU cores, "
        "one of them used, beside other work: therefore CPU seconds. The "
        "vision transformer of the preset `digits`, with the preset's options.",
        "",
        f"The target was fixed beforehand: {TARGET_ERROR:.0%} error on the validation images, 5 of "
        "179, at which the first version of this comparison was measured. Each optimizer has eight "
        f"settings, each with one run of seed {CHOOSING}, which ended there; the fastest (bold), "
        "by the epochs times the quickest of them, is the default. K-FAC's has the least learning "
        "rate that was tried.",
        "",
        *shown,
        f"The defaults, {len(RACING)} seeds to the end, means and 95 % intervals (Student's t; "
        "of times to the target geometric means). "
        "CPU seconds are the sum over epochs here. Test images are 180 that the grid has not seen; "
        "they were among 359 held-out images when the options that all settings share were chosen.",
        "",
        *race_table(racing),
        "",
        "`python -m benchmarks.digits --documented`: the optimizers as their pages give them, with "
        "nothing tuned, beside AdamW with the setting chosen above; medians over five seeds, and "
        "each seed's CPU seconds.",
        "",
        *documented_table(lines),
    ]
    return "\n".join(text) + "\n"
