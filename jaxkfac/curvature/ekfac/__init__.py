"""Eigenvalues measured in the factors' eigenbases (EKFAC)."""

from jaxkfac.curvature.ekfac._correct import (
    EigenvalueCorrector,
    check_program_layers,
    correct_eigenvalues,
)

__all__ = ["EigenvalueCorrector", "check_program_layers", "correct_eigenvalues"]
