"""Results of a fine-tuning run for the terminal."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rich.table import Table

from jaxkfac.report._finetune_records import FinetuneRecords, mean_loss
from jaxkfac.report._terminal import terminal_table


def finetune_table(
    records: FinetuneRecords,
    comparison: Mapping[str, Any],
    reference: Mapping[str, float] = MappingProxyType({}),
) -> Table:
    """Loss, and accuracy by each measure of likelihood, before and after.

    Args:
        records: Of the run.
        comparison: ``{variant: {"gained", "lost", "p_value"}}``.
        reference: Names of other models and their validation loss.
    """
    ends = [f"{mean_loss(records.losses, last=last):.4f}" for last in (False, True)]
    rows = [["training loss", *ends]]
    rows += held_out_rows(records, reference)
    rows += [[f"accuracy, {name}", *cells] for name, *cells in exam_rows(records, comparison)]
    return terminal_table(
        "Result", ["", "before", "after", "gained", "lost", "p"], rows, no_wrap=True
    )


def held_out_rows(records: FinetuneRecords, reference: Mapping[str, float]) -> list[list[str]]:
    """``[name, before, after]`` of the validation loss, other models' beside it, and the scores."""
    rows, held = [], [e.loss for e in records.exams if e.loss is not None]
    if held:
        rows.append(["validation loss", f"{held[0]:.4f}", f"{held[-1]:.4f}"])
        rows += [[f"that of a {name} model", "", f"{x:.4f}"] for name, x in reference.items()]
    scored = [e.scores for e in records.exams if e.scores is not None]
    if scored:
        rows += [[name, f"{scored[0][name]:.1%}", f"{x:.1%}"] for name, x in scored[-1].items()]
    return rows


def exam_rows(records: FinetuneRecords, comparison: Mapping[str, Any]) -> list[list[str]]:
    """``[variant, before, after, gained, lost, p]`` of each measure of likelihood."""
    if not records.exams:
        return []
    first, last = records.exams[0].accuracy, records.exams[-1].accuracy
    rows = []
    for variant in last:
        cells = [_interval(exam[variant]) for exam in (first, last) if variant in exam]
        found = comparison.get(variant, {})
        changes = [str(found[x]) for x in ("gained", "lost") if x in found]
        p_value = [f"{found['p_value']:.2g}"] if "p_value" in found else []
        rows.append([variant.replace("_", " "), *cells, *changes, *p_value])
    return rows


def _interval(ends: list[float]) -> str:
    value, low, high = ends
    return f"{value:.1%} [{low:.0%}, {high:.0%}]"
