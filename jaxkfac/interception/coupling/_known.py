"""Integers and booleans that are known when a program is traced.

Which examples a gather picks is known where its indices are. Often they are known in part:
``x[arange(n), chosen]`` builds one array of both columns. So a known array has a mask beside it, of
its entries that are known, and what moves entries about moves the mask along. Everything is
evaluated when somebody asks: most programs never do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkfac.interception._compat import Eqn, read_order

MOST_ENTRIES = 2**20


class KnownArray(NamedTuple):
    """An array of which some entries are known.

    Attributes:
        values: The entries.
        here: Which of them are known.
    """

    values: np.ndarray
    here: np.ndarray

    @classmethod
    def of(cls, values: Any) -> "KnownArray":
        values = np.asarray(values)
        return cls(values, np.ones(values.shape, bool))

    @property
    def whole(self) -> bool:
        return bool(self.here.all())


Ask = Callable[[], KnownArray | None]


def nothing() -> KnownArray | None:
    """Of an array no entry of which is known."""
    return None


def asked_once(ask: Ask) -> Ask:
    """The same answer, computed once."""
    held: list[KnownArray | None] = []

    def again() -> KnownArray | None:
        if not held:
            held.append(ask())
        return held[0]

    return again


def can_be_known(var: Any) -> bool:
    """Whether an array is small enough, and of integers or booleans."""
    dtype, shape = getattr(var.aval, "dtype", None), getattr(var.aval, "shape", ())
    plain = isinstance(dtype, np.dtype) and dtype.kind in "iub"
    return plain and math.prod(shape) <= MOST_ENTRIES


def known_result(eqn: Eqn, ins: Sequence[Ask], result: int = 0) -> Ask:
    """What is known of a result of a first-order equation."""

    def ask() -> KnownArray | None:
        operands = [one() for one in ins]
        if eqn.primitive.name in _MOVES:
            return _moved(eqn, operands)
        if any(x is None or not x.whole for x in operands):
            return None
        return _evaluated(eqn, [x.values for x in operands if x is not None], result)

    return asked_once(ask)


def _evaluated(eqn: Eqn, operands: Sequence[np.ndarray], result: int) -> KnownArray:
    if eqn.primitive.name in _NUMPY:
        values = _NUMPY[eqn.primitive.name](*operands)
        return KnownArray.of(np.asarray(values, eqn.outvars[0].aval.dtype))
    with jax.ensure_compile_time_eval():
        out = eqn.primitive.bind(*map(jax.numpy.asarray, operands), **eqn.params)
    return KnownArray.of(out[result] if eqn.primitive.multiple_results else out)


def _moved(eqn: Eqn, operands: Sequence[KnownArray | None]) -> KnownArray | None:
    """What is known after entries were moved, but not read."""
    if all(x is None for x in operands):
        return None
    shapes = [v.aval.shape for v in eqn.invars]
    move = _MOVES[eqn.primitive.name]
    known = [
        KnownArray(np.zeros(shape, int), np.zeros(shape, bool)) if x is None else x
        for x, shape in zip(operands, shapes, strict=True)
    ]
    values, here = [x.values for x in known], [x.here for x in known]
    dtype = eqn.outvars[0].aval.dtype
    return KnownArray(move(eqn, values).astype(dtype), move(eqn, here).astype(bool))


def _reshape(eqn: Eqn, each: Sequence[np.ndarray]) -> np.ndarray:
    return each[0].transpose(read_order(eqn)).reshape(eqn.outvars[0].aval.shape)


def _broadcast(eqn: Eqn, each: Sequence[np.ndarray]) -> np.ndarray:
    shape, at = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for d, s in zip(at, each[0].shape, strict=True):
        sizes[d] = s
    return np.broadcast_to(each[0].reshape(sizes), shape)


def _slice(eqn: Eqn, each: Sequence[np.ndarray]) -> np.ndarray:
    p = eqn.params
    strides = p["strides"] or [1] * each[0].ndim
    cuts = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    return each[0][tuple(slice(a, b, c) for a, b, c in cuts)]


_MOVES: dict[str, Callable[[Eqn, Sequence[np.ndarray]], np.ndarray]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "squeeze": lambda eqn, each: each[0].reshape(eqn.outvars[0].aval.shape),
    "expand_dims": lambda eqn, each: each[0].reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda eqn, each: each[0].transpose(eqn.params["permutation"]),
    "concatenate": lambda eqn, each: np.concatenate(list(each), eqn.params["dimension"]),
    "rev": lambda eqn, each: np.flip(each[0], eqn.params["dimensions"]),
    "convert_element_type": lambda eqn, each: each[0],
    "copy": lambda eqn, each: each[0],
    "stop_gradient": lambda eqn, each: each[0],
    "optimization_barrier": lambda eqn, each: each[0],
}
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "select_n": lambda which, *cases: np.select(
        [which.astype(int) == k for k in range(len(cases))], cases
    ),
}
