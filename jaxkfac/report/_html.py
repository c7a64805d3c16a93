"""One page that carries everything with it: no script, no font, no image from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxkfac._text import number
from jaxkfac.memory import Stage, bytes_text
from jaxkfac.report._capacity import CapacityReport
from jaxkfac.report._capacity_html import capacity_html
from jaxkfac.report._coverage import CoverageRow, stack_text
from jaxkfac.report._curves import curves_figure
from jaxkfac.report._factor_figures import WORDS, factor_figures
from jaxkfac.report._html_parts import figure_html, table_html
from jaxkfac.report._records import RunRecords
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._style import INK, MUTED, OPTIMIZERS, RULE

_CSS = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #fbfbf9; color: {INK};
  font: 16px/1.55 "Iowan Old Style", "Palatino Linotype", Palatino, Georgia, serif; }}
main {{ max-width: 60rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }}
h1 {{ font-size: 1.9rem; font-weight: 600; line-height: 1.2; margin: 0 0 .4rem; }}
h2 {{ font-size: 1.2rem; font-weight: 600; margin: 3rem 0 .6rem; }}
h3 {{ font-size: 1rem; font-weight: 600; margin: 1.8rem 0 .2rem; }}
p {{ max-width: 42rem; margin: .5rem 0; }}
.lead, figcaption, caption {{ color: {MUTED}; }}
.lead {{ font-size: 1.05rem; }}
figure {{ margin: 1rem 0 0; }}
figure img {{ display: block; width: 100%; height: auto; background: #fff;
  border: 1px solid {RULE}; border-radius: 4px; box-sizing: border-box; padding: .8rem; }}
figcaption {{ font-size: .9rem; margin-top: .5rem; max-width: 46rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin-top: .8rem;
  font: 13px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 600; color: {MUTED}; border-bottom: 1px solid {MUTED};
  padding: .35rem .6rem .35rem 0; white-space: nowrap; }}
td {{ border-bottom: 1px solid {RULE}; padding: .3rem .6rem .3rem 0; vertical-align: top; }}
td.n, th.n {{ text-align: right; }}
td.name {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: 12px; }}
details summary {{ cursor: pointer; margin-top: 1rem; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.8rem 0 0; }}
.card b {{ display: block; font-size: 1.9rem; font-weight: 500; line-height: 1.1; }}
.card span {{ color: {MUTED}; font-size: .9rem; }}
"""


def report_page(
    *,
    title: str,
    lead: str,
    runs: Mapping[str, RunRecords],
    spectra: Sequence[SpectrumRecord],
    coverage: Sequence[CoverageRow],
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    capacity: CapacityReport | None = None,
    stages: Stage | None = None,
    host_memory: Mapping[str, int | None] | None = None,
    first: Sequence[str] = (),
) -> str:
    """The report of a run as one HTML page; a part without records is left out.

    Args:
        title: Heading of the page.
        lead: One sentence below it.
        runs: ``{"kfac" or "adamw": records}``.
        spectra: Of the factors at the end.
        coverage: Rows of the layer table.
        config: Everything that decided the result; may be nested.
        versions: Of the software.
        capacity: Metrics of the factors at the end, with what they are compared with.
        stages: Peaks of memory, from ``jk.memory.track``.
        host_memory: ``{"resident": bytes at the end, "peak": bytes}`` of main memory.
        first: Parts of another kind of run, as HTML, which come before all others.

    Returns:
        The page, self-contained.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>', *first]
    if runs:
        parts += [_cards(runs), "<h2>Training</h2>", _curves(runs), _runs(runs)]
    if spectra:
        parts += ["<h2>Spectra of the factors</h2>", _spectra(spectra)]
    if capacity:
        parts += ["<h2>Capacity</h2>", capacity_html(capacity)]
    if coverage:
        parts += ["<h2>Coverage</h2>", _coverage(coverage)]
    if stages:
        parts += ["<h2>Memory</h2>", _host_memory(host_memory or {}), _stages(stages)]
    parts += ["<h2>Configuration</h2>", _pairs(_flat(config)), _pairs(versions.items())]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{escape(title)}</title>'
        f"<style>{_CSS}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _cards(runs: Mapping[str, RunRecords]) -> str:
    cards = []
    for name, run in runs.items():
        last, (label, color) = run.epochs[-1], OPTIMIZERS[name]
        cards.append(
            f'<div class="card"><b style="color:{color}">{last.test_accuracy:.2%}</b>'
            f"<span>test accuracy, {label}</span></div>"
            f'<div class="card"><b style="color:{color}">{last.train_loss:.4f}</b>'
            f"<span>training loss (nats), {label}</span></div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _curves(runs: Mapping[str, RunRecords]) -> str:
    return figure_html(
        curves_figure(runs),
        "Training loss and test error of each optimizer",
        "Both optimizers see the same examples in the same order, with the same shifts. Time "
        "is that of the training steps on the machine at hand, without compilation and "
        "evaluation.",
    )


def _spectra(spectra: Sequence[SpectrumRecord]) -> str:
    numbers = table_html(
        ["layer", "factor", "slice", "size", "top", "condition", "clipped", "raised",
         "entropy rank"],
        [
            [
                s.layer, s.side, ",".join(map(str, s.slice)), str(len(s.raw)), number(s.top),
                number(s.condition_raw), number(s.condition_clipped), str(s.raised),
                f"{s.entropy_rank:.1f}",
            ]
            for s in spectra
        ],
        text=2,
    )  # fmt: skip
    drawn = [figure_html(svg, *WORDS[name]) for name, svg in factor_figures(spectra).items()]
    note = (
        "<p>Condition: largest over smallest eigenvalue before and after clipping; a dash "
        "where the smallest is not positive. Entropy rank: exp(entropy) of the normalised "
        "eigenvalues.</p>"
    )
    return f"{''.join(drawn)}<details><summary>All numbers</summary>{note}{numbers}</details>"


def _host_memory(found: Mapping[str, int | None]) -> str:
    known = [f"{name} {bytes_text(n)}" for name, n in found.items() if n is not None]
    return f"<p>Main memory: {', '.join(known)}.</p>" if known else ""


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
    head = ["optimizer", "updates", "examples", "train loss", "test loss", "train acc.",
            "test acc.", "samples/s", "training", "compiling", "skipped"]  # fmt: skip
    return table_html(head, rows, text=1)


def _coverage(rows: Sequence[CoverageRow]) -> str:
    covered = sum(row.share for row in rows if not row.reason)
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
    head = ["layer", "kind", "in", "out", "stack", "parameters", "share", ""]
    table = table_html(head, body, text=2, last=True)
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
