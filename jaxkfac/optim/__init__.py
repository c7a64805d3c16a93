"""Optax transformations."""

from jaxkfac.optim._accumulators import MemoryKind, check_memory_kind, checked_accumulator_dtype
from jaxkfac.optim._adaptation import AdaptationState
from jaxkfac.optim._curvature import Curvature, shapes_of
from jaxkfac.optim._damping_rules import DampingRule, LevenbergMarquardt, Trial, Upcoming
from jaxkfac.optim._draw_rows import draw_rows
from jaxkfac.optim._kfac import SAFE_DAMPING, SAFE_NORM, kfac
from jaxkfac.optim._kfac_state import KfacState
from jaxkfac.optim._kfe_adam import KfeAdamState, kfe_adam
from jaxkfac.optim._multi_steps import has_updated, multi_steps
from jaxkfac.optim._multi_steps_state import MultiStepsState
from jaxkfac.optim._optimizer import Optimizer, OptimizerState, TrainState
from jaxkfac.optim._preconditioner import Preconditioner, preconditioner_of
from jaxkfac.optim._refresh import Periods
from jaxkfac.optim._scale_by_bases import ScaleByBasesState, scale_by_bases
from jaxkfac.optim._spring import SpringState, spring
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import advance_momentum, descend, norm_scale, once_where
from jaxkfac.optim._watch import StateWatch, check_state

__all__ = [
    "SAFE_DAMPING",
    "SAFE_NORM",
    "AdaptationState",
    "Curvature",
    "DampingRule",
    "KfacState",
    "KfeAdamState",
    "LevenbergMarquardt",
    "MemoryKind",
    "MultiStepsState",
    "Optimizer",
    "OptimizerState",
    "Periods",
    "Preconditioner",
    "ScaleByBasesState",
    "SpringState",
    "Stacks",
    "StateWatch",
    "TrainState",
    "Trial",
    "Upcoming",
    "advance_momentum",
    "check_memory_kind",
    "check_state",
    "checked_accumulator_dtype",
    "descend",
    "draw_rows",
    "has_updated",
    "kfac",
    "kfe_adam",
    "multi_steps",
    "norm_scale",
    "once_where",
    "preconditioner_of",
    "scale_by_bases",
    "shapes_of",
    "spring",
]
