"""Eigenvalues measured in the factors' eigenbases (EKFAC)."""

from jaxkfac.curvature.ekfac._correct import (
    EigenvalueCorrector,
    correct_eigenvalues,
    corrections_of,
)

__all__ = ["EigenvalueCorrector", "correct_eigenvalues", "corrections_of"]
