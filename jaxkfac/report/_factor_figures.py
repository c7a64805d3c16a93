"""The figures of a set of factors, by file name, and the words below them."""

from collections.abc import Sequence

from jaxkfac.report._conditions_figure import conditions_figure
from jaxkfac.report._ranks_figure import ranks_figure
from jaxkfac.report._spectra import SpectrumRecord
from jaxkfac.report._spectra_figure import spectra_figure

# {name: (what stands for the drawing, its caption)}
WORDS = {
    "spectra": (
        "Eigenvalues of every factor before and after clipping",
        "Dots: eigenvalues, as decomposed. Lines: after clipping. All depths of a layer share a "
        "panel, later ones lighter.",
    ),
    "ranks": (
        "Entropy rank of every factor over depth",
        "Entropy rank, exp(entropy) of the normalised eigenvalues, over depth: the slice of a "
        "stacked layer, or the order of layers whose names differ in a number. Dashed: the "
        "factor's size.",
    ),
    "conditions": (
        "Condition number of every factor before and after clipping",
        "Condition number before (open) and after clipping (filled). Where the smallest "
        "eigenvalue is not positive it is infinite. An input that several layers read is shown "
        "once.",
    ),
}


def factor_figures(records: Sequence[SpectrumRecord]) -> dict[str, bytes]:
    """``{"spectra", "ranks", "conditions": SVG}`` of all factors."""
    return {
        "spectra": spectra_figure(records),
        "ranks": ranks_figure(records),
        "conditions": conditions_figure(records),
    }
