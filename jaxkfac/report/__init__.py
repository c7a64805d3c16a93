"""Tables, plots and a self-contained HTML page from plain records."""

from jaxkfac.report._analysis import AnalysisRecord, MemoryRow, ModelMemory, exact_lines
from jaxkfac.report._analysis_html import analysis_page
from jaxkfac.report._analysis_tables import (
    depth_table,
    memory_plan_table,
    spectra_summary_table,
)
from jaxkfac.report._capacity import CapacityReport, interval_words, only_in_one
from jaxkfac.report._capacity_tables import capacity_table, comparison_table, model_table
from jaxkfac.report._conditions_figure import conditions_figure
from jaxkfac.report._coverage import CoverageRow, coverage_rows
from jaxkfac.report._curves import curves_figure
from jaxkfac.report._factor_figures import factor_figures
from jaxkfac.report._finetune_html import finetune_page
from jaxkfac.report._finetune_records import (
    ExamRecord,
    FinetuneRecords,
    FourierRecord,
    SampleRecord,
    mean_loss,
)
from jaxkfac.report._finetune_tables import finetune_table
from jaxkfac.report._html import report_page
from jaxkfac.report._influence_page import influence_page, influence_table
from jaxkfac.report._influence_records import QueryRecord, ScoredText
from jaxkfac.report._race import (
    TARGET_ERROR,
    at_target,
    interval,
    race_record,
    race_sentence,
)
from jaxkfac.report._ranks_figure import ranks_figure
from jaxkfac.report._records import EpochRecord, RunRecords
from jaxkfac.report._seeds import seeds_page, seeds_record, seeds_table
from jaxkfac.report._spectra import SpectrumRecord, spectrum_records
from jaxkfac.report._spectra_figure import spectra_figure
from jaxkfac.report._style import FIGURE_STYLE, svg_bytes
from jaxkfac.report._tables import coverage_table, runs_table, spectra_table
from jaxkfac.report._terminal import terminal_table
from jaxkfac.report._versions import versions

__all__ = [
    "FIGURE_STYLE",
    "TARGET_ERROR",
    "AnalysisRecord",
    "CapacityReport",
    "CoverageRow",
    "EpochRecord",
    "ExamRecord",
    "FinetuneRecords",
    "FourierRecord",
    "MemoryRow",
    "ModelMemory",
    "QueryRecord",
    "RunRecords",
    "SampleRecord",
    "ScoredText",
    "SpectrumRecord",
    "analysis_page",
    "at_target",
    "capacity_table",
    "comparison_table",
    "conditions_figure",
    "coverage_rows",
    "coverage_table",
    "curves_figure",
    "depth_table",
    "exact_lines",
    "factor_figures",
    "finetune_page",
    "finetune_table",
    "influence_page",
    "influence_table",
    "interval",
    "interval_words",
    "mean_loss",
    "memory_plan_table",
    "model_table",
    "only_in_one",
    "race_record",
    "race_sentence",
    "ranks_figure",
    "report_page",
    "runs_table",
    "seeds_page",
    "seeds_record",
    "seeds_table",
    "spectra_figure",
    "spectra_summary_table",
    "spectra_table",
    "spectrum_records",
    "svg_bytes",
    "terminal_table",
    "versions",
]
