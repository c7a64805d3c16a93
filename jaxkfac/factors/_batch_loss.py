"""The loss of one batch, as a function of the parameters: what adaptive optimizers ask for."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxkfac.factors._objective import Objective, returned
from jaxkfac.interception import leaves_by_path


class BatchCurvature(NamedTuple):
    """Of which loss, at which parameters and on which batch an operator is wanted.

    ``jk.operators.ggn`` makes it; :func:`jaxkfac.kfac` takes this in its place.

    Attributes:
        loss: A ``jk.Objective``, or a scalar loss that marks its outputs.
        params: The parameters.
        batch: The batch.
        key: For dropout, or ``None``.
        state: What a call changes (batch statistics), or ``None``.
    """

    loss: Callable[..., Any]
    params: PyTree
    batch: PyTree
    key: Any
    state: PyTree

    def check_params(self, params: PyTree) -> None:
        """Refuse other parameters than those of the update, as far as can be seen.

        Raises:
            ValueError: paths or shapes differ, or outside of ``jit`` values do.
        """
        ours, given = leaves_by_path(self.params), leaves_by_path(params)
        shapes = [{path: np.shape(x) for path, x in leaves.items()} for leaves in (ours, given)]
        same = shapes[0] == shapes[1] and all(map(_may_be_equal, ours.values(), given.values()))
        if not same:
            raise ValueError(
                "stats.adaptation(params, batch, key) is of other parameters than the update: call "
                "it with the params that tx.update(grads, state, params, ...) gets"
            )


def _may_be_equal(x: Any, y: Any) -> bool:
    if x is y or isinstance(x, Tracer) or isinstance(y, Tracer):
        return True
    if not (isinstance(x, jax.Array) and x.is_fully_addressable):
        return True
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return True
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=x.dtype.kind in "fc")


class AdaptationOfBatch(TypedDict):
    """Keyword arguments of an adaptive optimizer's update.

    Attributes:
        value: The loss at the parameters.
        value_fn: From parameters to the loss of the same batch, with the same random numbers.
        curvature: What the operator of its curvature is made of.
    """

    value: Float[Array, ""]
    value_fn: Callable[[PyTree], Float[Array, ""]]
    curvature: BatchCurvature


def adaptation_of(
    loss: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    key: Any,
    state: PyTree,
    *,
    has_aux: bool,
) -> AdaptationOfBatch:
    """What an adaptive optimizer needs of a batch; ``has_aux`` is that of a scalar loss."""

    def value_fn(params: PyTree) -> Float[Array, ""]:
        if isinstance(loss, Objective):
            out = loss(params, batch, key, state)
            return out[0] if loss.has_aux or state is not None else out
        return returned("the loss", loss, (params, batch), key, state, has_aux)[0]

    curvature = BatchCurvature(loss, params, batch, key, state)
    return AdaptationOfBatch(value=value_fn(params), value_fn=value_fn, curvature=curvature)
