"""Constants that are masks: every element is 0 or 1."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxkfac.interception._compat import Eqn
from jaxkfac.interception._values import Constant, Value
from jaxkfac.interception._views import SAME_ELEMENTS

_OF_MASKS = SAME_ELEMENTS | frozenset(
    "mul select_n broadcast_in_dim reshape transpose squeeze slice rev concatenate stack".split()
)


_MOST = 1 << 16  # elements of an array on a device that are fetched without a first look


def holds_mask(constant: Any) -> bool:
    """Whether the elements of a constant are known to be zeros and ones.

    Those of an array that is divided over processes are not: each knows a part. Of a large one,
    as a base model's kernel, a few elements are fetched first.
    """
    dtype = jnp.result_type(constant)
    if dtype == np.bool_:
        return True
    if isinstance(constant, Tracer) or not jnp.issubdtype(dtype, np.number):
        return False
    if isinstance(constant, jax.Array):
        if not (constant.is_fully_addressable or constant.is_fully_replicated):
            return False
        if constant.size > _MOST:
            with jax.ensure_compile_time_eval():
                first = constant.addressable_data(0)[(0,) * (constant.ndim - 1)][:_MOST]
            if not _zeros_and_ones(first):
                return False
    return _zeros_and_ones(constant)


def _zeros_and_ones(constant: Any) -> bool:
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
