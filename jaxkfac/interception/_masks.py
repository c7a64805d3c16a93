"""Constants that are masks: every element is 0 or 1."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._values import Constant, Value
from jaxkfac.interception._views import SAME_ELEMENTS

_OF_MASKS = SAME_ELEMENTS | frozenset(
    "mul select_n broadcast_in_dim reshape transpose squeeze slice rev concatenate stack".split()
)


def holds_mask(constant: Any) -> bool:
    """Whether the elements of a constant are known to be zeros and ones."""
    dtype = jnp.result_type(constant)
    if dtype == np.bool_:
        return True
    if isinstance(constant, Tracer) or not jnp.issubdtype(dtype, np.number):
        return False
    values = np.asarray(constant)
    return bool(((values == 0) | (values == 1)).all())


def is_mask(eqn: Eqn, ins: Sequence[Value]) -> bool:
    """Whether an equation of constants gives a mask."""
    if eqn.outvars[0].aval.dtype == np.bool_:
        return True
    return eqn.primitive.name in _OF_MASKS and all(
        isinstance(v, Constant) and (v.mask or operand.aval.dtype == np.bool_)
        for v, operand in zip(ins, eqn.invars, strict=True)
    )
