"""Figures of results: each function takes the object and returns the axes it drew on.

matplotlib is imported by the first figure: ``pip install "jaxkfac[report]"``. Figures of your own
look like these after ``plt.rcParams.update(jk.plot.FIGURE_STYLE)``.
"""

from jaxkfac.plot._calibration import calibration
from jaxkfac.plot._capacity import capacity
from jaxkfac.plot._coverage import coverage
from jaxkfac.plot._nonlinearities import nonlinearities
from jaxkfac.plot._plan import plan
from jaxkfac.plot._spectra import spectra
from jaxkfac.plot._style import COLORS, FACE, FIGURE_STYLE, INK, MUTED, RULE, SIDES

__all__ = [
    "COLORS",
    "FACE",
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
