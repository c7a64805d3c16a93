"""Factors to eigenbases, and what is done with them."""

from jaxkfac.curvature._apply import (
    Missing,
    apply_power,
    fisher_vector_product,
    natural_gradient,
)
from jaxkfac.curvature._coverage import Owner, covered_indices, owners, uncovered_mask
from jaxkfac.curvature._damped_gradients import (
    BlockDamping,
    check_block_damping,
    precondition_blocks,
    precondition_many,
    read_many,
    write_many,
)
from jaxkfac.curvature._divided import MeshAxis
from jaxkfac.curvature._eigenbases import (
    DiagonalEigenbasis,
    Eigenbases,
    KroneckerEigenbasis,
    check_bases,
    identity_bases,
)
from jaxkfac.curvature._eigendecompose import eigendecompose, iterate_eigenbases
from jaxkfac.curvature._inverses import (
    Inverses,
    check_separable,
    identity_inverses,
    invert,
    precondition,
)
from jaxkfac.curvature._owned_blocks import (
    OwnedBlock,
    block_eigenvalues,
    check_disjoint,
    owned_blocks,
    parameters_outside,
)
from jaxkfac.curvature._placement import Placement, solver_scratch
from jaxkfac.curvature._quadratic_forms import block_powers, quadratic_forms
from jaxkfac.curvature._reconstruct import reconstruct
from jaxkfac.curvature._rotated_blocks import (
    PartPower,
    RotatedPart,
    rotated,
    rotated_block,
    rotated_parts,
    rotated_powers,
    rotated_squares,
)
from jaxkfac.curvature.capacity import (
    CapacityComparison,
    CapacityInterval,
    CapacityMetrics,
    CapacityRecord,
    Change,
    Interval,
    OverLayers,
    capacity_interval,
    capacity_metrics,
    compare_capacity,
)
from jaxkfac.curvature.ekfac import EigenvalueCorrector, check_program_layers, correct_eigenvalues
from jaxkfac.curvature.host import HostCurvature

__all__ = [
    "BlockDamping",
    "CapacityComparison",
    "CapacityInterval",
    "CapacityMetrics",
    "CapacityRecord",
    "Change",
    "DiagonalEigenbasis",
    "Eigenbases",
    "EigenvalueCorrector",
    "HostCurvature",
    "Interval",
    "Inverses",
    "KroneckerEigenbasis",
    "MeshAxis",
    "Missing",
    "OverLayers",
    "OwnedBlock",
    "Owner",
    "PartPower",
    "Placement",
    "RotatedPart",
    "apply_power",
    "block_eigenvalues",
    "block_powers",
    "capacity_interval",
    "capacity_metrics",
    "check_bases",
    "check_block_damping",
    "check_disjoint",
    "check_program_layers",
    "check_separable",
    "compare_capacity",
    "correct_eigenvalues",
    "covered_indices",
    "eigendecompose",
    "fisher_vector_product",
    "identity_bases",
    "identity_inverses",
    "invert",
    "iterate_eigenbases",
    "natural_gradient",
    "owned_blocks",
    "owners",
    "parameters_outside",
    "precondition",
    "precondition_blocks",
    "precondition_many",
    "quadratic_forms",
    "read_many",
    "reconstruct",
    "rotated",
    "rotated_block",
    "rotated_parts",
    "rotated_powers",
    "rotated_squares",
    "solver_scratch",
    "uncovered_mask",
    "write_many",
]
