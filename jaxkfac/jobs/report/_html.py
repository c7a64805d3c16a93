"""The page of a training run: results, curves, factors, layers, memory, configuration."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from jaxkfac.jobs.report._capacity import CapacityReport, capacity_html
from jaxkfac.jobs.report._factor_figures import factor_panels_html
from jaxkfac.jobs.report._page import OPTIMIZERS, filled_columns, page_html, table_html
from jaxkfac.jobs.report._race import (
    TO_TARGET,
    RunRecords,
    at_target,
    curve_panels_html,
    race_sentence,
)
from jaxkfac.jobs.report._spectra import CoverageRow, SpectrumRecord, spectra_cells, stack_text
from jaxkfac.memory import Stage, bytes_text

# ---------------- the result in sentences


_Z = 1.959963984540054  # normal quantile of a 95 % interval


def train_answer(runs: Mapping[str, RunRecords], num_test: int | None = None) -> list[str]:
    """Sentences on the runs; the better one on the test examples comes first.

    Args:
        runs: ``{"kfac" or "adamw": records}``, with epochs.
        num_test: Number of test examples; without it there is no interval.
    """
    finished = {name: run for name, run in runs.items() if run.epochs}
    if len(finished) < 2:
        return [_alone(name, run, num_test) for name, run in finished.items()]
    best, second = sorted(finished, key=lambda name: -finished[name].epochs[-1].test_accuracy)[:2]
    return [_held_out(finished, best, second, num_test), _loss(finished)]


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion ``right`` of ``count``."""
    middle = right + _Z**2 / (2 * count)
    half = _Z * math.sqrt(right * (1 - right) / count + _Z**2 / (4 * count**2))
    return (middle - half) / (1 + _Z**2 / count), (middle + half) / (1 + _Z**2 / count)


def newcombe(first: float, second: float, count: int) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference of two proportions of ``count`` examples each.

    If the examples are the same, the true interval is narrower, since both are often right
    together.

    References:
        Newcombe, Interval estimation for the difference between independent proportions, 1998.
    """
    (low1, high1), (low2, high2) = wilson(first, count), wilson(second, count)
    low = first - second - math.hypot(first - low1, high2 - second)
    return low, first - second + math.hypot(high1 - first, second - low2)


def _alone(name: str, run: RunRecords, num_test: int | None) -> str:
    last = run.epochs[-1]
    ends = ""
    if num_test:
        low, high = wilson(last.test_accuracy, num_test)
        ends = f" (95 % interval {low:.1%} to {high:.1%})"
    return (
        f"{OPTIMIZERS[name][0]} is right on {last.test_accuracy:.1%}{ends} of the test "
        f"examples after {last.step:,} updates and {last.seconds:.1f} s of training."
    )


def _held_out(runs: Mapping[str, RunRecords], best: str, second: str, num_test: int | None) -> str:
    first_accuracy, second_accuracy = (
        runs[name].epochs[-1].test_accuracy for name in (best, second)
    )
    names = OPTIMIZERS[best][0], OPTIMIZERS[second][0]
    accuracies = f"{first_accuracy:.1%} against {second_accuracy:.1%} of the test examples"
    if num_test is None:
        return f"{names[0]} is right on {accuracies} ({names[1]})."
    low, high = newcombe(first_accuracy, second_accuracy, num_test)
    points = (
        f"{100 * (first_accuracy - second_accuracy):.1f} points, 95 % interval {100 * low:.1f} to "
        f"{100 * high:.1f}"
    )
    if low <= 0:
        return (
            f"On the test examples neither has won: {names[0]} is right on {first_accuracy:.1%}, "
            f"{names[1]} on {second_accuracy:.1%} ({points}, which contains zero)."
        )
    return f"{names[0]} has won on the test examples: {accuracies} for {names[1]} ({points})."


def _loss(runs: Mapping[str, RunRecords]) -> str:
    """When the run with the lower loss reached the final loss of the other."""
    low, high = sorted(runs, key=lambda name: runs[name].epochs[-1].train_loss)[:2]
    end = runs[high].epochs[-1]
    epochs = runs[low].epochs
    reached = next(epoch for epoch in epochs if epoch.train_loss <= end.train_loss)
    names = OPTIMIZERS[low][0], OPTIMIZERS[high][0]
    return (
        f"{names[0]} ends with the lower training loss, {epochs[-1].train_loss:.3g} against "
        f"{end.train_loss:.3g} nats. It reached {names[1]}'s final loss after {reached.step:,} "
        f"updates and {reached.seconds:.1f} s; {names[1]} needed {end.step:,} updates and "
        f"{end.seconds:.1f} s."
    )


# ---------------- the page


def report_page(
    *,
    title: str,
    lead: str,
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    runs: Mapping[str, RunRecords] = MappingProxyType({}),
    spectra: Sequence[SpectrumRecord] = (),
    coverage: Sequence[CoverageRow] = (),
    capacity: CapacityReport | None = None,
    stages: Stage | None = None,
    host_memory: Mapping[str, int | None] | None = None,
    first: Sequence[str] = (),
    plan: Sequence[str] = (),
    answer: Sequence[str] = (),
    num_test: int | None = None,
    runs_last: bool = False,
) -> str:
    """The report of a run as one HTML page; sections without records are left out.

    Args:
        title: Heading of the page.
        lead: One sentence below it.
        config: Every option that decides the result; may be nested.
        versions: Versions of the software.
        runs: ``{"kfac" or "adamw": records}``.
        spectra: Spectra of the factors at the end.
        coverage: Rows of the layer table.
        capacity: Metrics of the factors at the end, with what they are compared with.
        stages: Peaks of memory, from ``jk.memory.track``.
        host_memory: ``{"resident": bytes at the end, "peak": bytes}`` of main memory.
        first: Sections of another kind of run, as HTML, placed before all others.
        plan: Sections on planned memory, as HTML, placed before the measured memory.
        answer: Sentences on the result; by default derived from the runs.
        num_test: Number of test examples of the runs, for intervals in the answer.
        runs_last: Whether the page is about the factors: the runs come after them.

    Returns:
        The page, self-contained.
    """
    training = []
    if runs and runs_last:  # the answer at the top is about the factors
        said = f"<p>{escape(' '.join(train_answer(runs, num_test)))}</p>"
        training = ["<h2>Training</h2>", said, _cards(runs), _curves(runs), _runs(runs)]
    elif runs:
        training = [_cards(runs), "<h2>Training</h2>", _curves(runs), _runs(runs)]
    sections = [*first] if runs_last else [*first, *training]
    if spectra:
        sections += ["<h2>Spectra of the factors</h2>", _spectra(spectra)]
    if capacity:
        sections += ["<h2>Capacity</h2>", capacity_html(capacity)]
    if coverage:
        sections += ["<h2>Coverage</h2>", _coverage(coverage)]
    sections += [*(training if runs_last else ()), *plan]
    if stages:
        sections += ["<h2>Memory</h2>", _host_memory(host_memory or {}), _stages(stages)]
    sections += ["<h2>Configuration</h2>", _pairs(_flat(config)), _pairs(versions.items())]
    if runs and not answer:
        first_at = race_sentence({name: [run] for name, run in runs.items()})
        answer = [first_at, *train_answer(runs, num_test)]
    return page_html(title, lead, sections, answer=answer)


def _cards(runs: Mapping[str, RunRecords]) -> str:
    cards = []
    for name, run in runs.items():
        last, label = run.epochs[-1], OPTIMIZERS[name][0]
        cards.append(
            f'<div class="card"><b class="{name}">{last.test_accuracy:.2%}</b>'
            f"<span>test accuracy, {label}</span></div>"
            f'<div class="card"><b class="{name}">{last.train_loss:.4f}</b>'
            f"<span>training loss (nats), {label}</span></div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _curves(runs: Mapping[str, RunRecords]) -> str:
    return (
        f"{curve_panels_html(runs)}<p>All optimizers see the same examples in the same order, with "
        "the same shifts. Time is the time of the training steps on this machine, without "
        "compilation and evaluation. Faint lines show the loss of each update on its own examples. "
        "Gradient norms are taken before clipping.</p>"
    )


def _spectra(spectra: Sequence[SpectrumRecord]) -> str:
    head, *rows = spectra_cells(spectra)
    note = (
        "<p>Condition: largest over smallest eigenvalue before and after clipping; a dash "
        "where the smallest is not positive. Entropy rank: exp(entropy) of the normalized "
        "eigenvalues.</p>"
    )
    shown = (
        f"<details><summary>All numbers</summary>{note}{table_html(head, rows, text=2)}</details>"
    )
    return f"{factor_panels_html(spectra)}{shown}"


def _host_memory(memory: Mapping[str, int | None]) -> str:
    texts = [f"{name} {bytes_text(n)}" for name, n in memory.items() if n is not None]
    return f"<p>Main memory: {', '.join(texts)}.</p>" if texts else ""


def _stages(stages: Stage) -> str:
    head, *rows = stages.table()
    return table_html(head, rows, text=1)


def _runs(runs: Mapping[str, RunRecords]) -> str:
    rows = []
    for name, run in runs.items():
        last = run.epochs[-1]
        rows.append(
            [
                OPTIMIZERS[name][0],
                *at_target([run]),
                str(last.step),
                str(last.examples),
                f"{last.train_loss:.4f}",
                f"{last.test_loss:.4f}",
                f"{last.train_accuracy:.2%}",
                f"{last.test_accuracy:.2%}",
                f"{run.samples_per_second:,.1f}",
                f"{last.seconds:.1f} s",
                f"{run.compile_seconds:.1f} s",
                str(run.skipped),
            ]
        )
    head = ["optimizer", *TO_TARGET, "updates", "examples", "train loss", "test loss", "train acc.",
            "test acc.", "samples/s", "training", "compiling", "skipped"]  # fmt: skip
    return table_html(head, rows, text=1)


def _coverage(rows: Sequence[CoverageRow]) -> str:
    # Rows of layers do not add up: a tied embedding and head are two, with one parameter.
    covered = 1 - sum(row.share for row in rows if row.reason)
    lead = f"<p>Factors cover {covered:.1%} of the parameters.</p>"
    body = [
        [
            r.name, r.kind, "" if r.inputs is None else str(r.inputs),
            "" if r.outputs is None else str(r.outputs), stack_text(r.stack), str(r.parameters),
            f"{r.share:.1%}", r.reason or (f"input of {r.shares_input_with}"
                                           if r.shares_input_with else ""),
        ]
        for r in rows
    ]  # fmt: skip
    head = ["layer", "kind", "in", "out", "stack", "parameters", "share", "shared or not covered"]
    filled = filled_columns(head, body)
    head, *body = ([row[i] for i in filled] for row in (head, *body))
    table = table_html(head, body, text=2, last=filled[-1] == 7)
    if len(rows) <= 60:
        return lead + table
    return f"{lead}<details><summary>{len(rows)} layers</summary>{table}</details>"


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs


def _pairs(pairs: Any) -> str:
    items = "".join(f"<tr><td class='name'>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>"
                    for k, v in pairs)  # fmt: skip
    return f"<table><tbody>{items}</tbody></table>"
