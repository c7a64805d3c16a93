"""The analysis of a pretrained model: its record, tables, figures and page."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jaxkfac._text import number
from jaxkfac.curvature.capacity import CapacityRecord
from jaxkfac.jobs.report._capacity import (
    CapacityReport,
    capacity_sentences,
    curvature_table,
    print_capacity,
)
from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._layer_table import TableOfLayers
from jaxkfac.jobs.report._page import (
    LEAST_POINTS,
    LINE_COLORS,
    Axis,
    Line,
    panel_html,
    panels_html,
    table_html,
    terminal_table,
)
from jaxkfac.jobs.report._spectra import SIDE_TEXT, CoverageRow, SpectrumRecord, families
from jaxkfac.memory import Stage, bytes_text

# ---------------- the record of an analysis, as plain values


class MemoryRow(NamedTuple):
    """Bytes for one purpose in a stage of an analysis.

    Attributes:
        stage: Stages that need them, separated by commas; ``"always"`` for all.
        what: Purpose.
        nbytes: Number of bytes.
        on_device: Whether they are on the device; on a CPU all are.
    """

    stage: str
    what: str
    nbytes: int
    on_device: bool = True


class ModelMemory(NamedTuple):
    """Planned and measured memory of one model's analysis.

    Attributes:
        model: Name of the model.
        plan: The plan that was printed before the analysis.
        peaks: ``{stage: most bytes of main memory}``, measured.
        passes: Backward passes over each batch.
        disk: Planned bytes on disk.
    """

    model: str
    plan: Sequence[MemoryRow]
    peaks: Mapping[str, int]
    passes: int
    disk: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [row._asdict() for row in self.plan]
        return self._asdict() | {"plan": rows, "peaks": dict(self.peaks)}


class AnalysisRecord(NamedTuple):
    """An analysis of a pretrained model.

    Attributes:
        model: Name of the model.
        texts: ``{"texts", "tokens" in the loss, "left out", "loss" in nats a token}``.
        spectra: Spectra of every decomposed factor.
        capacity: Metrics, optionally compared with those of another model.
        exact: ``{"eigenvalues", "error_bounds", "steps"}`` of the exact Fisher, or ``None``.
        plans: Plan and peaks of the model, then of the model it is compared with.
        coverage: Which parameters the factors cover.
        config: Every option that decides the result.
        versions: Versions of the software.
        stages: Times and peaks of this process.
        host_memory: ``{"resident": bytes at the end, "peak": bytes}`` of main memory.
    """

    model: str
    texts: Mapping[str, float]
    spectra: Sequence[SpectrumRecord]
    capacity: CapacityReport
    exact: Mapping[str, Any] | None
    plans: Sequence[ModelMemory]
    coverage: Sequence[CoverageRow]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    stages: Stage
    host_memory: Mapping[str, int | None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        first, *compared = self.plans
        of_model = {name: x for name, x in first.to_dict().items() if name != "model"}
        return {
            "model": self.model,
            "texts": dict(self.texts),
            "spectra": [record._asdict() for record in self.spectra],
            **self.capacity.to_dict(),
            "exact": self.exact,
            **of_model,
            "compared": compared[0].to_dict() if compared else None,
            "coverage": [row._asdict() for row in self.coverage],
            "config": dict(self.config),
            "versions": dict(self.versions),
            "host_memory": dict(self.host_memory),
            "memory": self.stages.to_dict(),
        }


def stage_sums(plan: Sequence[MemoryRow], *, on_device: bool) -> dict[str, int]:
    """``{stage: bytes}`` of a plan; rows for ``"always"`` count in each stage."""
    stages = [name for row in plan for name in row.stage.split(", ") if name != "always"]
    return {
        stage: sum(
            row.nbytes
            for row in plan
            if row.on_device == on_device and (row.stage == "always" or stage in row.stage)
        )
        for stage in dict.fromkeys(stages)
    }


def exact_lines(record: AnalysisRecord) -> list[str]:
    """Sentences on the eigenvalues of the exact Fisher; empty if they were not computed."""
    if record.exact is None:
        return []
    pairs = zip(record.exact["eigenvalues"], record.exact["error_bounds"], strict=True)
    values = ", ".join(f"{number(value)} ± {number(bound)}" for value, bound in pairs)
    largest = record.capacity.metrics.model.scalars()["largest"]
    return [
        f"Exact Fisher on the first texts, after {record.exact['steps']} steps of Lanczos: "
        f"largest eigenvalues {values}.",
        f"Largest of the Kronecker factors over all texts: {number(largest)}.",
    ]


# ---------------- capacity over depth: a row for each block of a stack


class DepthStack(NamedTuple):
    """Layers that are stacked together, such as the blocks of a decoder.

    Attributes:
        name: Common prefix of their names.
        layers: ``{remainder of the name: record of each block}``.
    """

    name: str
    layers: dict[str, tuple[CapacityRecord, ...]]

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(next(iter(self.layers.values())))

    def head(self) -> list[str]:
        """Headings of the columns of :meth:`rows`."""
        return ["block", *self.layers, "trace", "share"]

    def rows(self) -> Iterator[list[str]]:
        """For each block: entropy rank of each layer, trace, and share of the stack's trace."""
        traces = [sum(x[i].trace for x in self.layers.values()) for i in range(self.depth)]
        total = sum(traces)
        for i, trace in enumerate(traces):
            ranks = (number(records[i].entropy_rank) for records in self.layers.values())
            share = f"{trace / total:.1%}" if total else "–"
            yield [str(i), *ranks, number(trace), share]


def stacks_of(report: CapacityReport) -> list[DepthStack]:
    """The stacks of a model in its order, without layers that have no two factors."""
    layers_by_stack: dict[tuple[str, int], dict[str, tuple[CapacityRecord, ...]]] = {}
    for name, record in report.metrics.layers.items():
        if len(record.slices) < 2 or record.scalars().get("num_above_a") is None:
            continue
        first = "/".join(name.split("/")[:2])
        short_name = name.removeprefix(f"{first}/").removesuffix("/kernel")
        layers_by_stack.setdefault((first, len(record.slices)), {})[short_name] = record.slices
    return [DepthStack(name, layers) for (name, _), layers in layers_by_stack.items()]


# ---------------- capacity over depth: a panel for each measure, a line for each layer


_MEASURES = {
    "entropy_rank": "entropy rank",
    "participation_ratio": "participation ratio",
    "trace": "trace",
}


def _depth_panels(stack: DepthStack) -> str:
    """A row of panels for each part of a block, such as its attention, from the first block on."""
    parts: dict[str, dict[str, tuple[CapacityRecord, ...]]] = {}
    for name, records in stack.layers.items():
        part, _, layer = name.rpartition("/")
        parts.setdefault(part, {})[layer] = records
    rows = []
    for part, layers in parts.items():
        colors = dict(zip(layers, itertools.cycle(LINE_COLORS), strict=False))
        panels = []
        for measure, title in _MEASURES.items():
            lines = [
                Line(
                    layer, range(stack.depth), [getattr(x, measure) for x in records], colors[layer]
                )
                for layer, records in layers.items()
            ]
            above = f"{part}: {title}" if part else title.capitalize()
            panels.append(panel_html(above, lines, Axis("block"), Axis("", log=True)))
        legend = [(color, layer) for layer, color in colors.items()]
        rows.append(panels_html(panels, legend=legend))
    return "".join(rows)


# ---------------- tables for the terminal


_FEW = 48  # largest number of blocks that a terminal shows one by one


def memory_plan_rows(
    plan: Sequence[MemoryRow], *, disk: int, peaks: Mapping[str, int] | None = None
) -> list[list[str]]:
    """``[stage, what, bytes, peak]`` for each row of a plan and each sum, with measured peaks."""
    rows = []
    for on_device in (True, False):
        rows_of_memory = [row for row in plan if row.on_device == on_device]
        where = "" if all(row.on_device for row in plan) or on_device else ", main memory"
        rows += [
            [row.stage, row.what + where, bytes_text(row.nbytes), ""] for row in rows_of_memory
        ]
        for stage, nbytes in stage_sums(rows_of_memory, on_device=on_device).items():
            peak = (peaks or {}).get(stage)
            is_resident = not on_device or all(row.on_device for row in plan)
            measured = bytes_text(peak) if peak is not None and is_resident else ""
            rows.append([f"{stage}, sum{where}", "", bytes_text(nbytes), measured])
    rows.append(["disk", "folded factors, sums of a pass, vectors", bytes_text(disk), ""])
    return rows


def memory_plan_table(
    model: str, plan: Sequence[MemoryRow], *, disk: int, peaks: Mapping[str, int] | None = None
) -> Table:
    """A table of planned memory; with ``peaks`` it also has the measured values."""
    head, rows = ["stage", "", "plan", "peak"], memory_plan_rows(plan, disk=disk, peaks=peaks)
    if peaks is None:
        head, rows = head[:3], [row[:3] for row in rows]
    return terminal_table(f"Memory of the analysis of {model}", head, rows, text_columns=(0, 1))


def spectra_summary_rows(records: Sequence[SpectrumRecord]) -> list[list[str]]:
    """A line for each factor over all its blocks: smallest value, and largest if different."""
    rows = []
    for family in families(records, shared_once=True):
        members = family.members
        rows.append(
            [
                family.title,
                family.side,
                str(len(members)),
                _range([float(len(x.raw)) for x in members]),
                _range([x.top for x in members]),
                _range([x.condition_raw for x in members]),
                _range([x.condition_clipped for x in members]),
                str(sum(x.raised for x in members)),
                _range([x.entropy_rank for x in members]),
            ]
        )
    return rows


SUMMARY_HEAD = [
    *("layer", "factor", "blocks", "size", "top", "condition", "clipped", "raised"),
    "entropy rank",
]


def spectra_summary_table(records: Sequence[SpectrumRecord]) -> TableOfLayers:
    """A table with one line for each factor over all its blocks."""
    rows = [
        [title, SIDE_TEXT.get(side, side), *cells]
        for title, side, *cells in spectra_summary_rows(records)
    ]
    return TableOfLayers("Spectra", SUMMARY_HEAD, rows, text_columns=(0, 1))


def depth_table(report: CapacityReport) -> Table | None:
    """One line for each block of the stacks; ``None`` without stacks or with too many blocks."""
    stacks = stacks_of(report)
    if not stacks or sum(stack.depth for stack in stacks) > _FEW:
        return None
    table = None
    for stack in stacks:
        title = f"{stack.name}: entropy rank of each layer, and trace"
        last = [name.rpartition("/")[2] for name in stack.layers]
        names = dict(zip(stack.layers, last)) if len({*last}) == len(last) else {}
        head = [names.get(heading, heading) for heading in stack.head()]
        stack_table = terminal_table("", head, list(stack.rows()))
        stack_table.padding = (0, 1, 0, 0)
        if table is None:
            table = Table.grid()
        table.add_row(title, style="italic")  # as a title it would wrap to a narrow table
        table.add_row(stack_table)
    return table


def _range(values: Sequence[float | None]) -> str:
    """Smallest and largest value; ``None`` represents an infinite value."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "–"
    ends = [number(min(finite)), "–" if len(finite) < len(values) else number(max(finite))]
    return ends[0] if ends[0] == ends[1] else " … ".join(ends)


# ---------------- the page


def print_curvature(
    console: Console, spectra: Sequence[SpectrumRecord], report: CapacityReport
) -> None:
    """Print what the analysis found, and a table of the layers that fits 80 columns."""
    for sentence in curvature_answer(spectra, report):
        console.print(sentence, highlight=False)
    console.print(curvature_table(report))


def print_analysis(console: Console, record: AnalysisRecord, *, tables: bool = False) -> None:
    """Print what the analysis found, and the layers.

    With ``tables``, also spectra, capacity, its course over depth, and planned and measured memory.
    """
    print_curvature(console, record.spectra, record.capacity)
    for line in exact_lines(record):
        console.print(line, highlight=False)
    if not tables:
        return
    console.print(spectra_summary_table(record.spectra))
    print_capacity(console, record.capacity)
    if (depth := depth_table(record.capacity)) is not None:
        console.print(depth)
    for model in record.plans:
        table = memory_plan_table(model.model, model.plan, disk=model.disk, peaks=model.peaks)
        console.print(table)


def curvature_answer(spectra: Sequence[SpectrumRecord], report: CapacityReport) -> list[str]:
    """Sentences on the capacity of the curvature and on the conditions of its factors.

    Args:
        spectra: Spectra of the factors.
        report: Capacity of the same factors.
    """
    model = report.metrics.model.scalars()
    sentences = [
        f"The curvature of {model['dimension']:,} parameters has an entropy rank of "
        f"{number(model['entropy_rank'])} and, with N = {report.metrics.num_examples:,g} and "
        f"δ = {report.metrics.damping:g}, {number(model['effective_dimension'])} effective "
        "dimensions."
    ]
    if spectra:
        singular = sum(record.condition_raw is None for record in spectra)
        raised = sum(record.raised > 0 for record in spectra)
        finite = [x.condition_raw for x in spectra if x.condition_raw is not None]
        conditions = (
            f"condition numbers of its {len(spectra):,} factors range over {_range(finite)}"
        )
        if singular == len(spectra):
            conditions = f"the condition numbers of all its {len(spectra):,} factors are infinite"
        elif singular:
            conditions += f", and {singular:,} are infinite"
        sentences.append(
            f"Before clipping, {conditions}; clipping raises eigenvalues in {raised:,} of them."
        )
    return [*sentences, *capacity_sentences(report)]


def _depth_sentence(stack: DepthStack) -> str:
    """The blocks with the lowest and the highest mean entropy rank, and with the most trace."""
    ranks, traces = (
        [sum(getattr(records[i], name) for records in stack.layers.values())
         for i in range(stack.depth)]
        for name in ("entropy_rank", "trace")
    )  # fmt: skip
    return (
        f"Entropy rank, summed over the layers of a block, is lowest in block "
        f"{ranks.index(min(ranks))} and highest in block {ranks.index(max(ranks))}; the trace is "
        f"largest in block {traces.index(max(traces))}."
    )


_DEPTH = (
    "Entropy rank, participation ratio and trace of each layer's block of the curvature, from "
    "the first block of the model to the last."
)


def analysis_page(record: AnalysisRecord) -> str:
    """The results as one self-contained HTML page."""
    texts = record.texts
    lead = (
        f"Factors over {texts['texts']:,g} texts, {texts['tokens']:,g} tokens in the loss, "
        f"{texts['loss']:.3f} nats a token."
    )
    first = [_summary(record)]
    if record.exact is not None:
        lines = "".join(f"<p>{escape(line)}</p>" for line in exact_lines(record))
        first.append(f"<h2>Exact Fisher</h2>{lines}")
    return report_page(
        title=f"Spectra and capacity of {record.model}",
        lead=lead,
        spectra=record.spectra,
        coverage=record.coverage,
        config=record.config,
        versions=record.versions,
        capacity=record.capacity,
        stages=record.stages,
        host_memory=record.host_memory,
        first=[*first, *_depth(record)],
        plan=[_memory(record)],
        answer=curvature_answer(record.spectra, record.capacity),
    )


def _memory(record: AnalysisRecord) -> str:
    peak = record.host_memory.get("peak")
    sentence = "" if peak is None else f" The process held at most {bytes_text(peak)}."
    first, *compared = (_of_model(x) for x in record.plans)
    comparisons = "".join(
        f"<p>The model that it is compared with, {escape(x.model)}:</p>{text}"
        for x, text in zip(record.plans[1:], compared, strict=True)
    )
    return (
        "<h2>Plan and peaks</h2><p>The plan was made before anything was loaded."
        f"{sentence}</p>{first}{comparisons}"
    )


def _of_model(memory: ModelMemory) -> str:
    rows = memory_plan_rows(memory.plan, disk=memory.disk, peaks=memory.peaks)
    pass_text = "a backward pass" if memory.passes == 1 else f"{memory.passes} backward passes"
    table = table_html(["stage", "what", "plan", "peak"], rows, text=2)
    return f"<p>Gathered in {pass_text} over each batch.</p>{table}"


def _summary(record: AnalysisRecord) -> str:
    table = table_html(SUMMARY_HEAD, spectra_summary_rows(record.spectra), text=2)
    return f"<h2>Factors</h2><p>All blocks of a layer in one line, smallest … largest.</p>{table}"


def _depth(record: AnalysisRecord) -> list[str]:
    sections = []
    for stack in stacks_of(record.capacity):
        table = table_html(stack.head(), list(stack.rows()), text=1)
        if stack.depth < LEAST_POINTS:
            sections.append(f"<h2>Depth: {escape(stack.name)}</h2>{table}")
            continue
        caption = f"<p>{escape(f'{_depth_sentence(stack)} {_DEPTH}')}</p>"
        sections.append(
            f"<h2>Depth: {escape(stack.name)}</h2>{_depth_panels(stack)}{caption}<details>"
            "<summary>Block by block: entropy rank of each layer, and trace</summary>"
            f"{table}</details>"
        )
    return sections
