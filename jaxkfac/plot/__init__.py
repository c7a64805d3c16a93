"""Figures of results: each function takes the object and returns the axes it drew on.

matplotlib is imported by the first figure: ``pip install "jaxkfac[report]"``.
"""

from jaxkfac.plot._calibration import calibration
from jaxkfac.plot._capacity import capacity
from jaxkfac.plot._coverage import coverage
from jaxkfac.plot._nonlinearities import nonlinearities
from jaxkfac.plot._plan import plan
from jaxkfac.plot._spectra import spectra
from jaxkfac.plot._style import FIGURE_STYLE, INK, MUTED, RULE, SIDES

__all__ = [
    "FIGURE_STYLE",
    "INK",
    "MUTED",
    "RULE",
    "SIDES",
    "calibration",
    "capacity",
    "coverage",
    "nonlinearities",
    "plan",
    "spectra",
]
