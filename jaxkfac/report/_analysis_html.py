"""The page of the analysis of a pretrained model."""

from html import escape

from jaxkfac.memory import bytes_text
from jaxkfac.report._analysis import AnalysisRecord, ModelMemory, exact_lines
from jaxkfac.report._analysis_tables import SUMMARY_HEAD, memory_plan_rows, spectra_summary_rows
from jaxkfac.report._depth import stacks_of
from jaxkfac.report._depth_figure import depth_figure
from jaxkfac.report._html import report_page
from jaxkfac.report._html_parts import figure_html, table_html

_DEPTH = (
    "Entropy rank, participation ratio and trace of each layer's block of the curvature, from "
    "the first block of the model to the last."
)


def analysis_page(record: AnalysisRecord) -> str:
    """Everything that was found, as one self-contained HTML page."""
    texts = record.texts
    lead = (
        f"Factors over {texts['texts']:,g} texts, {texts['tokens']:,g} tokens in the loss, "
        f"{texts['loss']:.3f} nats a token."
    )
    first = [_memory(record), _summary(record)]
    if record.exact is not None:
        lines = "".join(f"<p>{escape(line)}</p>" for line in exact_lines(record))
        first.append(f"<h2>Exact Fisher</h2>{lines}")
    return report_page(
        title=f"Spectra and capacity of {record.model}",
        lead=lead,
        runs={},
        spectra=record.spectra,
        coverage=record.coverage,
        config=record.config,
        versions=record.versions,
        capacity=record.capacity,
        stages=record.stages,
        host_memory=record.host_memory,
        first=[*first, *_depth(record)],
    )


def _memory(record: AnalysisRecord) -> str:
    peak = record.host_memory.get("peak")
    known = "" if peak is None else f" The process held at most {bytes_text(peak)}."
    first, *compared = (_of_model(x) for x in record.plans)
    others = "".join(
        f"<p>Of {escape(x.model)}, with which it is compared:</p>{text}"
        for x, text in zip(record.plans[1:], compared, strict=True)
    )
    return (
        "<h2>Plan and peaks</h2><p>The plan was made before anything was loaded."
        f"{known}</p>{first}{others}"
    )


def _of_model(memory: ModelMemory) -> str:
    rows = memory_plan_rows(memory.plan, disk=memory.disk, peaks=memory.peaks)
    words = "a backward pass" if memory.passes == 1 else f"{memory.passes} backward passes"
    table = table_html(["stage", "", "plan", "peak"], rows, text=2)
    return f"<p>Gathered in {words} over each batch.</p>{table}"


def _summary(record: AnalysisRecord) -> str:
    table = table_html(SUMMARY_HEAD, spectra_summary_rows(record.spectra), text=2)
    return f"<h2>Factors</h2><p>All blocks of a layer in one line, smallest … largest.</p>{table}"


def _depth(record: AnalysisRecord) -> list[str]:
    parts = []
    for stack in stacks_of(record.capacity):
        table = table_html(stack.head(), list(stack.rows()), text=1)
        figure = figure_html(depth_figure(stack), f"Capacity of {stack.name} over depth", _DEPTH)
        parts.append(
            f"<h2>Depth: {escape(stack.name)}</h2>{figure}<details><summary>Block by block: "
            f"entropy rank of each layer, and trace</summary>{table}</details>"
        )
    return parts
