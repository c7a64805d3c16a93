"""A table and a page about runs that differ only in their seed."""

from collections.abc import Mapping
from html import escape
from typing import Any

from rich.table import Table

from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._page import OPTIMIZERS, table_html, terminal_table, versions
from jaxkfac.jobs.report._race import (
    TO_TARGET,
    EpochRecord,
    Runs,
    at_target,
    interval,
    interval_record,
    race_record,
    race_sentence,
)

_HEAD = ["optimizer", *TO_TARGET, "train loss", "test acc. (%)", "train s"]


def seeds_table(runs: Runs) -> Table:
    """Means and 95 % intervals over the seeds, for the last epoch and for the time to the target.

    Args:
        runs: The runs of each optimizer, one for each seed.
    """
    # A column for each optimizer: six columns of intervals are wider than a terminal.
    (_, *names), *rows = zip(_HEAD, *_rows(runs), strict=True)
    return terminal_table(_title(runs), ["mean [95 % interval]", *names], rows, no_wrap=True)


def seeds_page(runs: Runs, *, folders: Mapping[str, str]) -> str:
    """The table of :func:`seeds_table` as an HTML page, with links to the pages of the runs.

    Args:
        runs: The runs of each optimizer, one for each seed.
        folders: ``{seed: page of its run}``.
    """
    links = [f'<a href="{escape(page)}">seed {escape(seed)}</a>' for seed, page in folders.items()]
    first = [
        f"<p>{escape(race_sentence(runs))}</p>",
        table_html(_HEAD, _rows(runs), text=1),
        f"<p>{', '.join(links)}</p>",
    ]
    return report_page(
        title=_title(runs),
        lead="Means over the seeds (geometric means of times to the target) with 95 % intervals "
        "of Student's t in brackets, cut off at 0 and at 100 % accuracy. The seeds differ in "
        "initial parameters, order, shifts and sampled labels, and share the images.",
        config={},
        versions=versions(),
        first=first,
    )


def seeds_record(runs: Runs) -> dict[str, Any]:
    """Plain values for JSON: ``to_target``, and ``final`` with intervals for the last epoch.

    Args:
        runs: The runs of each optimizer, one for each seed.
    """
    final = {
        name: {
            measured: interval_record([getattr(run.epochs[-1], measured) for run in runs_of_one])
            for measured in EpochRecord._fields
            if measured not in ("step", "examples")
        }
        for name, runs_of_one in runs.items()
    }
    return {"to_target": race_record(runs), "final": final}


def _title(runs: Runs) -> str:
    return f"Result of {len(next(iter(runs.values())))} seeds"


def _rows(runs: Runs) -> list[list[str]]:
    accuracies = {
        name: [100 * run.epochs[-1].test_accuracy for run in runs_of_one]
        for name, runs_of_one in runs.items()
    }
    return [
        [
            OPTIMIZERS[name][0],
            *at_target(runs_of_one),
            interval([run.epochs[-1].train_loss for run in runs_of_one], ".4f"),
            interval(accuracies[name], ".2f", highest=100.0),
            interval([run.epochs[-1].seconds for run in runs_of_one], ".1f"),
        ]
        for name, runs_of_one in runs.items()
    ]
