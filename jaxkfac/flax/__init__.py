"""Flax: NNX models as functions, Linen's training state, and states as Flax writes them.

No other package below the models of ``jaxkfac.jobs`` imports Flax.
"""

from jaxkfac.flax._nnx import NnxApply, as_state, from_nnx
from jaxkfac.flax._states import LinenTrainState, serializable, state_field

__all__ = [
    "LinenTrainState",
    "NnxApply",
    "as_state",
    "from_nnx",
    "serializable",
    "state_field",
]
