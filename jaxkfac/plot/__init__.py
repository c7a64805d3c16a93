"""Figures of results: each function takes the object and returns the axes it drew on.

matplotlib is imported by the first figure: ``pip install "jaxkfac[report]"``. Figures of your own
look like these after ``plt.rcParams.update(jk.plot.FIGURE_STYLE)``.
"""

from jaxkfac.plot._figures import (
    COLORS,
    FACE,
    FIGURE_STYLE,
    INK,
    MUTED,
    RULE,
    SIDES,
    calibration,
    capacity,
    coverage,
    nonlinearities,
    plan,
    spectra,
)

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
