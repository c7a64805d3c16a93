"""From the records to the page of numbers."""

from benchmarks._numbers._page import page
from benchmarks._numbers._row import Goal, Row, Section
from benchmarks._numbers._sections import SECTIONS

__all__ = ["SECTIONS", "Goal", "Row", "Section", "page"]
