"""The page of a fine-tuning run."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxkfac._text import number
from jaxkfac.jobs.report._capacity import CapacityReport, capacity_html
from jaxkfac.jobs.report._finetune_records import (
    FinetuneRecords,
    FourierRecord,
    SampleRecord,
    exam_rows,
    held_out_rows,
)
from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._page import (
    LEAST_POINTS,
    LINE_COLORS,
    Axis,
    Line,
    panel_html,
    panels_html,
    table_html,
)
from jaxkfac.jobs.report._race import driven_panels
from jaxkfac.jobs.report._spectra import joined
from jaxkfac.lslora import Nonlinearity, find_nonlinearity

# ---------------- panels: loss, and the adapter's nonlinearity over the updates


def loss_panels_html(records: FinetuneRecords) -> str:
    """Loss of each update, its running mean and validation loss; then rate and gradient norm."""
    updates = range(1, len(records.losses) + 1)
    lines = [
        Line("one update", updates, records.losses, "a", faint=True),
        Line("training", updates, running_mean(records.losses), "a"),
    ]
    legend = [("a", "training")]
    validation = [(e.step, e.loss) for e in records.exams if e.loss is not None]
    if len(validation) >= LEAST_POINTS:  # fewer are in the table of the validation
        steps, losses = zip(*validation)
        lines.append(Line("validation", steps, losses, "adamw"))
        legend.append(("adamw", "validation"))
    panel = panel_html(
        "Loss, by updates", lines, Axis("updates"), Axis("nats per token in the loss")
    )
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
    for index, start in enumerate(phi.initial):
        series = {
            layer: [np.asarray(r.layers[layer]["coefficients"])[:, index] - start for r in records]
            for layer in records[0].layers
        }
        panels.append(_panel(f"c{index} − {start:g}", records, series))
    legend = [(color, joined([layer])) for layer, color in _colors(records)]
    return panels_html(panels, legend=legend)


def _panel(
    title: str, records: Sequence[FourierRecord], series: dict[str, list[np.ndarray]]
) -> str:
    """Mean over a layer's slices, with faint lines for the smallest and largest of several."""
    steps, lines = [r.step for r in records], []
    for layer, color in _colors(records):
        if layer not in series:
            continue
        label, values = joined([layer]), series[layer]
        if values[0].size > 1:
            for extreme, of in (("least", np.min), ("largest", np.max)):
                ends = [float(of(x)) for x in values]
                lines.append(Line(f"{label}, {extreme}", steps, ends, color, faint=True))
        lines.append(Line(label, steps, [float(x.mean()) for x in values], color))
    return panel_html(title, lines, Axis("updates"), Axis(""))


def _colors(records: Sequence[FourierRecord]) -> Iterator[tuple[str, str]]:
    for i, layer in enumerate(records[0].layers):
        yield layer, LINE_COLORS[i % len(LINE_COLORS)]


def running_mean(losses: Sequence[float], decay: float = 0.85) -> list[float]:
    """A debiased exponential mean, which starts at the first loss."""
    shown, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = decay * total + (1 - decay) * loss, decay * weight + (1 - decay)
        shown.append(total / weight)
    return shown


# ---------------- the page


_ENDS = "Lines are means over a layer's blocks; faint lines are the smallest and the largest block."


def finetune_page(
    *,
    records: FinetuneRecords,
    comparison: Mapping[str, Any],
    capacity: CapacityReport | None,
    nonlinearity: str = "fourier",
    reference: Mapping[str, float] = MappingProxyType({}),
    trained: str = "the adapter",
    **page: Any,
) -> str:
    """The report of a fine-tuning run as one HTML page; sections without records are left out.

    Args:
        records: Records of the run.
        comparison: ``{variant: {"gained", "lost", "p_value"}}``, before against after.
        capacity: Capacity of the adapter's factors at the end.
        nonlinearity: Name of the adapter's, where it has one.
        reference: Names of other models and their validation loss.
        trained: Name of what capacity is measured on.
        **page: Arguments of :func:`report_page`; spectra and coverage are the adapter's.

    Returns:
        The page, self-contained.
    """
    sections = [_training(records)]
    if records.exams and records.exams[-1].accuracy:
        sections.append(_questions(records, comparison))
    if rows := held_out_rows(records, reference):
        table = table_html(["on text that was held out", "before", "after"], rows, text=1)
        sections.append(f"<h2>Validation</h2>{table}")
    if records.samples:
        sections += ["<h2>Samples</h2>", _samples(records.samples)]
    if records.fourier:
        sections += ["<h2>Nonlinearity of the adapter</h2>", _fourier(records, nonlinearity)]
    if capacity:
        name = "" if capacity.total_name == "whole model" else f": {capacity.total_name}"
        sections += [f"<h2>Capacity of {trained}{name}</h2>", capacity_html(capacity)]
    return report_page(**page, first=sections, answer=_answer(records, comparison))


def _answer(records: FinetuneRecords, comparison: Mapping[str, Any]) -> list[str]:
    """Sentences on what training has changed, on held-out data if there is any."""
    if not records.losses:
        return []
    spent = f"{len(records.losses):,} updates and {sum(records.seconds):.1f} s of training"
    sentences = []
    exams = [exam for exam in records.exams if exam.loss is not None]
    if len(exams) > 1:
        before, after = exams[0].loss, exams[-1].loss
        sentences.append(
            f"Loss on held-out text went from {before:.3g} to {after:.3g} nats in {spent}."
        )
    else:
        ends = records.mean_losses
        sentences.append(f"Training loss went from {ends[0]:.3g} to {ends[1]:.3g} nats in {spent}.")
    for variant, change in list(comparison.items())[-1:]:
        before, after = (x.accuracy[variant] for x in (records.exams[0], records.exams[-1]))
        p = change["p_value"]
        verdict = f"chance {'does not' if p < 0.05 else 'may'} explain the change"
        sentences.append(
            f"Questions answered correctly ({variant}): {before[0]:.1%} before, {after[0]:.1%} "
            f"after (95 % interval {after[1]:.1%} to {after[2]:.1%}; p = {p:.2g}: {verdict})."
        )
    return sentences


def _training(records: FinetuneRecords) -> str:
    rows = [
        [
            str(len(records.losses)),
            f"{sum(records.tokens):,}",
            f"{sum(records.learnt):,}",
            *(f"{loss:.4f}" for loss in records.mean_losses),
            f"{records.samples_per_second:,.1f}",
            f"{records.tokens_per_second:,.0f}",
            f"{sum(records.seconds):.1f} s",
            f"{records.compile_seconds:.1f} s, {records.programs}",
            str(records.skipped),
        ]
    ]
    head = ["updates", "tokens", "in the loss", "first loss", "last loss", "samples/s",
            "tokens/s", "training", "compiling, programs", "skipped"]  # fmt: skip
    note = (
        "<p>The faint line is the loss of each update on its own tokens, before the update. The "
        "strong line is its running mean. First and last loss are means over a tenth of the "
        "updates.</p>"
    )
    return f"<h2>Training</h2>{loss_panels_html(records)}{note}{table_html(head, rows, text=0)}"


def _questions(records: FinetuneRecords, comparison: Mapping[str, Any]) -> str:
    count = len(next(iter(records.exams[-1].correct.values())))
    note = (
        f"<p>{count} questions. The model's answer is the choice with the largest score. The four "
        "scores are the sum of the choice's token log-likelihoods, the sum per token, the sum per "
        "byte, and the sum minus the choice's log-likelihood without the question (pmi). Brackets "
        "are Wilson's 95 % intervals; p is McNemar's exact test on the questions whose answer "
        "changed.</p>"
    )
    head = ["likelihood", "before", "after", "gained", "lost", "p"]
    return f"<h2>Questions</h2>{note}{table_html(head, exam_rows(records, comparison), text=1)}"


def _samples(samples: Sequence[SampleRecord]) -> str:
    steps = sorted({s.step for s in samples})
    answers = {(s.prompt, s.step): s.answer for s in samples}
    prompts = {s.prompt: s.target for s in samples}
    rows = [[p, *(answers.get((p, step), "") for step in steps)] for p in prompts]
    head = ["prompt", *(f"after {step} updates" if step else "before" for step in steps)]
    if any(target is not None for target in prompts.values()):
        rows = [[*row, prompts[row[0]] or ""] for row in rows]
        head.append("wanted")
    return table_html(head, rows, text=len(head) + 1)


def _fourier(records: FinetuneRecords, nonlinearity: str) -> str:
    phi = find_nonlinearity(nonlinearity)
    note = escape(
        f"{phi.formula}. Nonlinearity: {phi.strength_formula}. Saturated: {phi.saturated_formula}."
    )
    rows = []
    for layer, values in records.fourier[-1].layers.items():
        means = [*np.asarray(values["coefficients"]).mean(0)]
        means += [
            np.mean(values[name]) if values.get(name) is not None else None
            for name in ("sigma", "deviation", "nonlinearity", "saturated")
        ]
        rows.append([layer, *(number(None if x is None else float(x)) for x in means)])
    coefficients = [f"c{index}" for index in range(len(phi.initial))]
    head = ["layer, mean over blocks", *coefficients, "σ", "deviation", "nonlinearity",
            "saturated"]  # fmt: skip
    table = f"<p>{escape(_moved(records, phi))}</p>{table_html(head, rows, text=1)}"
    if len(records.fourier) < LEAST_POINTS:
        return f"{table}<p>{note}</p>"
    return f"{table}{nonlinearity_panels_html(records.fourier, phi)}<p>{escape(_ENDS)} {note}</p>"


def _moved(records: FinetuneRecords, phi: Nonlinearity) -> str:
    """Which coefficients training has moved most, and whether branches became nonlinear."""
    last = records.fourier[-1].layers
    moved = {
        (layer, index): float(np.abs(values - phi.initial[index]).mean())
        for layer, of_layer in last.items()
        for index, values in enumerate(np.asarray(of_layer["coefficients"]).T)
    }
    (layer, index), distance = max(moved.items(), key=lambda item: item[1])
    strengths = [np.max(x["nonlinearity"]) for x in last.values() if x["nonlinearity"] is not None]
    strongest = f" The largest nonlinearity is {number(float(max(strengths)))}." * bool(strengths)
    return (
        f"Training moved c{index} of {joined([layer])} most: by {number(distance)} on average over "
        f"its blocks.{strongest}"
    )
