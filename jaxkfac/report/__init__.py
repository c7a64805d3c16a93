"""Tables, plots and a self-contained HTML page from plain records."""

from jaxkfac.report._coverage import CoverageRow, coverage_rows
from jaxkfac.report._curves import curves_figure
from jaxkfac.report._html import report_page
from jaxkfac.report._records import EpochRecord, RunRecords
from jaxkfac.report._spectra import SpectrumRecord, spectrum_records
from jaxkfac.report._spectra_figure import spectra_figure
from jaxkfac.report._tables import coverage_table, runs_table, spectra_table
from jaxkfac.report._versions import versions

__all__ = [
    "CoverageRow",
    "EpochRecord",
    "RunRecords",
    "SpectrumRecord",
    "coverage_rows",
    "coverage_table",
    "curves_figure",
    "report_page",
    "runs_table",
    "spectra_figure",
    "spectra_table",
    "spectrum_records",
    "versions",
]
