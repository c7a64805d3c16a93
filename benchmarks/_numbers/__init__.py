"""From the records to the page of numbers."""

from benchmarks._numbers._figures import figures, pages, prose, unlinked
from benchmarks._numbers._page import page
from benchmarks._numbers._quoted import QUOTED
from benchmarks._numbers._row import Goal, Row, Section
from benchmarks._numbers._sections import SECTIONS, clock_ratios

__all__ = [
    "QUOTED",
    "SECTIONS",
    "Goal",
    "Row",
    "Section",
    "clock_ratios",
    "figures",
    "page",
    "pages",
    "prose",
    "unlinked",
]
