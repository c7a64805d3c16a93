"""Tables, plots and a self-contained HTML page from plain records."""

from jaxkfac.jobs.report._analysis import (
    AnalysisRecord,
    MemoryRow,
    ModelMemory,
    analysis_page,
    curvature_answer,
    memory_plan_table,
    print_analysis,
    print_curvature,
)
from jaxkfac.jobs.report._capacity import (
    CapacityReport,
    print_capacity,
)
from jaxkfac.jobs.report._factor_figures import (
    write_factor_figures,
)
from jaxkfac.jobs.report._finetune_html import finetune_page
from jaxkfac.jobs.report._finetune_records import (
    ExamRecord,
    FinetuneRecords,
    FourierRecord,
    SampleRecord,
    finetune_table,
)
from jaxkfac.jobs.report._html import report_page
from jaxkfac.jobs.report._influence_page import (
    QueryRecord,
    ScoredText,
    influence_page,
    influence_table,
)
from jaxkfac.jobs.report._page import terminal_table, versions
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
    "coverage_rows",
    "curvature_answer",
    "finetune_page",
    "finetune_table",
    "influence_page",
    "influence_table",
    "interval",
    "memory_plan_table",
    "print_analysis",
    "print_capacity",
    "print_curvature",
    "race_record",
    "race_sentence",
    "report_page",
    "runs_table",
    "seeds_page",
    "seeds_record",
    "seeds_table",
    "spectra_table",
    "spectrum_records",
    "terminal_table",
    "versions",
    "write_factor_figures",
]
