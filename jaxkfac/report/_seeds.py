"""Runs that differ in their seed, as one table and one page."""

from collections.abc import Mapping
from html import escape

from rich.table import Table

from jaxkfac.report._html import report_page
from jaxkfac.report._html_parts import table_html
from jaxkfac.report._race import TO_TARGET, Runs, at_target, interval, race_sentence
from jaxkfac.report._style import OPTIMIZERS
from jaxkfac.report._terminal import terminal_table
from jaxkfac.report._versions import versions

_HEAD = ["optimizer", *TO_TARGET, "train loss", "test acc. (%)", "train s"]


def seeds_table(runs: Runs) -> Table:
    """The median over the seeds and the range, of the time to the target and of the last epoch.

    Args:
        runs: For each optimizer its runs, one for each seed.
    """
    return terminal_table(_title(runs), _HEAD, _rows(runs), no_wrap=True)


def seeds_page(runs: Runs, *, folders: Mapping[str, str]) -> str:
    """The same as an HTML page, with links to the runs' own.

    Args:
        runs: For each optimizer its runs, one for each seed.
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
        lead="Medians over the seeds and, in brackets, their range.",
        runs={},
        spectra=[],
        coverage=[],
        config={},
        versions=versions(),
        first=first,
    )


def _title(runs: Runs) -> str:
    return f"Result of {len(next(iter(runs.values())))} seeds"


def _rows(runs: Runs) -> list[list[str]]:
    return [
        [
            OPTIMIZERS[name][0],
            *at_target(found),
            interval([run.epochs[-1].train_loss for run in found], ".4f"),
            interval([100 * run.epochs[-1].test_accuracy for run in found], ".2f"),
            interval([run.epochs[-1].seconds for run in found], ".1f"),
        ]
        for name, found in runs.items()
    ]
