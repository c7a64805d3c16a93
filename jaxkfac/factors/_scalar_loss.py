"""The loss of one batch as a function of the parameters, and the checks of scalar losses."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._mapped_axes import axes_apart, num_devices, sum_over_devices
from jaxkfac.factors._fisher import Estimator
from jaxkfac.factors._loss_terms import Head
from jaxkfac.factors._marks import MarkedTerms
from jaxkfac.factors._model_call import ModelCall, check_array, returned
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._options import GatheringOptions
from jaxkfac.interception import Traced, jaxpr_of, lifted, marks_of

# ---------------- the loss of one batch, for adaptive optimizers


class BatchCurvature(NamedTuple):
    """The loss, parameters and batch whose curvature an operator multiplies by.

    ``jk.operators.ggn`` builds the operator; :func:`jaxkfac.kfac` accepts this in its place.

    Attributes:
        loss: A ``jk.Objective``, or a scalar loss that marks its outputs.
        params: The parameters.
        batch: The batch.
        key: For dropout, or ``None``.
        state: What a call changes (batch statistics), or ``None``.
        axes: Mapped axes whose devices hold the rest of the batch.
        has_aux: Whether a scalar loss returns ``(value, aux)``.
    """

    loss: Callable[..., Any]
    params: ArrayTree
    batch: ArrayTree
    key: Any
    state: ArrayTree
    axes: tuple[str, ...] = ()
    has_aux: bool = False

    @property
    def call(self) -> ModelCall:
        """The call of the model or loss."""
        return ModelCall(self.params, self.batch, self.key, self.state)

    def check_params(self, params: ArrayTree) -> None:
        """Refuse parameters other than those of the update, as far as that can be seen.

        Raises:
            ValueError: paths or shapes differ, or (outside ``jit``) values differ.
        """
        ours, theirs = leaves_by_path(self.params), leaves_by_path(params)
        shapes = [{path: np.shape(x) for path, x in leaves.items()} for leaves in (ours, theirs)]
        equal = shapes[0] == shapes[1] and all(map(_may_be_equal, ours.values(), theirs.values()))
        if not equal:
            raise ValueError(
                "stats.adaptation(params, batch, key) was computed at other parameters than the "
                "update: call "
                "it with the params that tx.update(grads, state, params, ...) gets"
            )


def _may_be_equal(x: Any, y: Any) -> bool:
    if x is y or isinstance(x, Tracer) or isinstance(y, Tracer):
        return True
    if not isinstance(x, jax.Array | np.ndarray) or not all(map(_is_here, (x, y))):
        return True
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return True
    # Not `dtype.kind`, which is "V" for bfloat16 too.
    equal_nan = jnp.issubdtype(x.dtype, jnp.inexact)
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=equal_nan)


def _is_here(x: Any) -> bool:
    """Whether this process can read all of an array."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


class AdaptationOfBatch(TypedDict):
    """Keyword arguments of an adaptive optimizer's update.

    Attributes:
        value: The loss at the parameters.
        value_fn: From parameters to the loss of the same batch, with the same random numbers.
        curvature: What the operator of the loss's curvature is built from.
    """

    value: Float[Array, ""]
    value_fn: Callable[[ArrayTree], Float[Array, ""]]
    curvature: BatchCurvature


def adaptation_of(
    loss: Callable[..., Any],
    call: ModelCall,
    axes: tuple[str, ...] = (),
    *,
    has_aux: bool,
    value: Any = None,
) -> AdaptationOfBatch:
    """What an adaptive optimizer needs from a batch.

    Args:
        loss: A ``jk.Objective``, or a scalar loss that marks its outputs.
        call: Its arguments.
        axes: Mapped axes whose devices hold the rest of the batch.
        has_aux: Whether a scalar loss returns ``(value, aux)``.
        value: The loss there, if it is known.
    """

    def value_fn(params: ArrayTree) -> Float[Array, ""]:
        here = call._replace(params=params)
        value, _ = share_of_loss(loss, here, axes, has_aux=has_aux)
        return sum_over_devices(value, axes_apart(axes, value))

    curvature = BatchCurvature(loss, *call, axes=axes, has_aux=has_aux)
    value = value_fn(call.params) if value is None else value
    return AdaptationOfBatch(value=value, value_fn=value_fn, curvature=curvature)


def share_of_loss(
    loss: Callable[..., Any], call: ModelCall, names: tuple[str, ...], *, has_aux: bool
) -> tuple[Float[Array, ""], Any]:
    """This device's share of the loss of the batch of all devices, as ``Program.linearise`` has it.

    The shares of the devices add up to the loss, over the axes over which they may differ.

    Args:
        loss: A ``jk.Objective``, or a scalar loss.
        call: Its arguments.
        names: Mapped axes whose devices hold the rest of the batch.
        has_aux: Whether a scalar loss returns ``(value, aux)``.

    Returns:
        The share, and what came beside the loss, as ``returned`` gives it.
    """
    params, batch, key, state = call
    if isinstance(loss, Objective) and not names:
        out = loss(params, batch, key, state)
        return out if loss.has_aux or state is not None else (out, None)
    if isinstance(loss, Objective):
        checked = loss.batch(batch)
        outputs, beside = loss.outputs(params, checked.inputs, key, state)
        terms_of = loss.of_batch(outputs, checked, names)
        value, _ = terms_of.loss(outputs, checked.targets, checked.mask)
        return value, beside

    def whole(params: Any, batch: Any, key: Any, state: Any) -> tuple[Any, Any]:
        return returned("the loss", loss, (params, batch), key, state, has_aux)

    if not names:
        return whole(*call)
    closed, shapes = jaxpr_of(whole, *call)
    marks = marks_of(closed.jaxpr)
    out = lifted(closed.jaxpr, closed.consts, jax.tree.leaves(call), [None] * len(marks))
    value, beside = jax.tree.unflatten(jax.tree.structure(shapes), out.result)
    outputs = jax.lax.stop_gradient(out.outputs)
    if not marks:  # every device has as many terms
        return value / num_devices(axes_apart(names, value)), beside
    terms = MarkedTerms(marks, *jax.lax.stop_gradient((out.weights, out.masks)))
    terms = terms.over_devices(outputs, names)
    if terms.axes:
        value = value * terms.share(outputs, value).astype(value.dtype)
    return value, beside


# ---------------- options that a scalar loss cannot serve


def check_marked(traced: Traced, estimator: Estimator, options: GatheringOptions) -> None:
    """Refuse options that do not go with marks, and labels that do not fit them."""
    if options.loss_terms is not None:
        raise ValueError(
            f"loss_terms={options.loss_terms} beside jk.mark_outputs, which counts its terms: "
            "leave one out"
        )
    if options.uncovered == "diagonal":
        raise ValueError(
            'uncovered="diagonal" runs each example by itself, which a scalar loss does not show: '
            "give a jk.Objective"
        )
    if estimator.labels is not None:
        _check_labels(traced, estimator.labels)


def _check_labels(traced: Traced, labels: Any) -> None:
    """Refuse labels that do not fit the marks."""
    number = len(labels) if isinstance(labels, list | tuple) else None
    if number != len(traced.marks):
        number_or_type = type(labels).__name__ if number is None else number
        raise ValueError(
            f"labels: expected a list with (samples, *targets) for each of the {len(traced.marks)} "
            f"marks, got {number_or_type}"
        )
    for k, (mark, mine) in enumerate(zip(traced.marks, labels, strict=True)):
        check_array(f"labels[{k}]", mine)
        if not mine.shape or mine.shape[:1] != labels[0].shape[:1] or not mine.shape[0]:
            raise ValueError(
                f"labels[{k}] have shape {mine.shape}, expected (samples, *targets) with as many "
                "samples for each mark"
            )
        head = Head(mark.likelihood, mark.shape, name=f"labels[{k}]")
        one = jax.ShapeDtypeStruct(mine.shape[1:], mine.dtype)  # masked terms may have any label
        jax.eval_shape(lambda targets, head=head: head._replace(targets=targets).check(), one)


def check_scalar_loss(options: GatheringOptions, estimator: Estimator) -> None:
    """Refuse what needs a model's outputs, which a scalar loss does not show."""
    wrong = {
        "fisher": (estimator.name, estimator.needs_outputs),
        "sharing": (options.sharing, options.sharing != "expand"),
        "scales": (options.scales, options.scales not in ("auto", "diagonal")),
    }
    for name, (value, refused) in wrong.items():
        if refused:
            raise ValueError(
                f'{name}="{value}" needs the model\'s outputs: give a jk.Objective, not a '
                "scalar loss, or name them inside the loss with jk.mark_outputs"
            )
    if options.uncovered == "diagonal":
        raise ValueError('uncovered="diagonal" needs a jk.Objective, not a scalar loss')
    terms = options.loss_terms
    if terms is None or terms < 1:
        raise ValueError(
            f"loss_terms={terms}: expected the number of rows that the loss is the mean of, or "
            "jk.mark_outputs inside the loss"
        )


def warn_of_sum(loss: Callable[[ArrayTree], Float[Array, ""]], batch: ArrayTree) -> bool:
    """Warn if a loss looks like a sum over rows, where values are concrete.

    The loss is evaluated on a third of the rows, once, twice and three times over. A mean stays
    the same; a sum is once, twice and three times as large. A mean that divides by a constant
    number of rows, or whose weights sum to one, also grows, so this warns and does not refuse. A
    sum with a penalty or with dropout noise is not noticed, nor one whose arrays do not share
    their leading axis, or that may divide by a scalar of the batch.

    Returns:
        Whether it warned.
    """
    leaves = jax.tree.leaves(batch)
    sizes = {x.shape[:1] for x in leaves if np.ndim(x)}
    if len(sizes) != 1 or not all(map(np.ndim, leaves)):
        return False
    ((rows,),) = sizes
    some = max(rows // 3, 1)

    def repeated(times: int) -> ArrayTree:
        def of(x: Array) -> Array:
            return jnp.concatenate([x[:some]] * times)

        return jax.tree.map(of, batch)

    try:
        single, double, tripled = (float(loss(repeated(times))) for times in (1, 2, 3))
    except Exception:  # a loss may require a certain number of rows; its error is not about sums
        return False
    close = 1e-3 * abs(single)
    if not single or abs(double - 2 * single) > close or abs(tripled - 3 * single) > close:
        return False
    warnings.warn(
        f"the loss looks like a sum over rows, expected a mean: on {some} rows of the batch it is "
        f"{single:.6g}, and on the same rows twice {double:.6g}. Divide a sum by the number of its "
        "rows, or G is too large by its square. If the loss is a mean that divides by a constant, "
        "or whose weights sum to one, nothing is wrong",
        UserWarning,
        stacklevel=2,
    )
    return True
