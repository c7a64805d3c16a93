"""Tables, plots and a self-contained HTML page from plain records."""

from jaxkfac.jobs.report._analysis import (
    AnalysisRecord,
    MemoryRow,
    ModelMemory,
    analysis_page,
    curvature_answer,
    depth_table,
    exact_lines,
    memory_plan_table,
    spectra_summary_table,
)
from jaxkfac.jobs.report._capacity import (
    CapacityReport,
    capacity_table,
    comparison_table,
    interval_words,
    model_table,
    only_in_one,
)
from jaxkfac.jobs.report._factor_figures import (
    factor_figures,
)
from jaxkfac.jobs.report._finetune_html import finetune_page
from jaxkfac.jobs.report._finetune_records import (
    ExamRecord,
    FinetuneRecords,
    FourierRecord,
    SampleRecord,
    finetune_table,
    mean_loss,
)
from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._influence_page import (
    QueryRecord,
    ScoredText,
    influence_page,
    influence_table,
)
from jaxkfac.jobs.report._page import FIGURE_STYLE, svg_bytes, terminal_table, versions
from jaxkfac.jobs.report._race import (
    TARGET_ERROR,
    EpochRecord,
    RunRecords,
    at_target,
    interval,
    race_record,
    race_sentence,
    runs_table,
)
from jaxkfac.jobs.report._seeds import seeds_page, seeds_record, seeds_table
from jaxkfac.jobs.report._spectra import (
    CoverageRow,
    SpectrumRecord,
    coverage_rows,
    spectra_table,
    spectrum_records,
)

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
    "coverage_rows",
    "curvature_answer",
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
    "report_page",
    "runs_table",
    "seeds_page",
    "seeds_record",
    "seeds_table",
    "spectra_summary_table",
    "spectra_table",
    "spectrum_records",
    "svg_bytes",
    "terminal_table",
    "versions",
]
