"""Factors to eigenbases, and what is done with them."""

from jaxkfac.curvature._apply import (
    Missing,
    apply_power,
    fisher_vector_product,
    natural_gradient,
)
from jaxkfac.curvature._eigenbases import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    check_all_vectors,
    check_bases,
    check_vectors,
    identity_bases,
)
from jaxkfac.curvature._eigendecompose import eigendecompose, reconstruct
from jaxkfac.curvature._in_place import refresh_bases, refresh_inverses
from jaxkfac.curvature._inverses import (
    Inverses,
    check_separable,
    identity_inverses,
    invert,
    precondition,
)
from jaxkfac.curvature._layer_power import (
    Form,
    Operands,
    Owner,
    Power,
    covered_indices,
    owners,
    parameters_outside,
    powered_eigenvalues,
    powered_output_eigenvalues,
    quadratic,
    solve,
    uncovered_mask,
)
from jaxkfac.curvature._placement import MeshAxis, Placement, solver_scratch
from jaxkfac.curvature.ekfac import EigenvalueCorrector, check_program_layers, correct_eigenvalues
from jaxkfac.curvature.host import HostCurvature

__all__ = [
    "DiagonalEigenbasis",
    "Eigenbases",
    "EigenvalueCorrector",
    "Form",
    "HostCurvature",
    "Inverses",
    "KroneckerEigenbasis",
    "MeshAxis",
    "Missing",
    "Operands",
    "Owner",
    "Placement",
    "Power",
    "apply_power",
    "check_all_vectors",
    "check_bases",
    "check_program_layers",
    "check_separable",
    "check_vectors",
    "correct_eigenvalues",
    "covered_indices",
    "eigendecompose",
    "fisher_vector_product",
    "identity_bases",
    "identity_inverses",
    "invert",
    "natural_gradient",
    "owners",
    "parameters_outside",
    "powered_eigenvalues",
    "powered_output_eigenvalues",
    "precondition",
    "quadratic",
    "reconstruct",
    "refresh_bases",
    "refresh_inverses",
    "solve",
    "solver_scratch",
    "uncovered_mask",
]
