"""What a scalar loss cannot give, and what one that marks its outputs cannot."""

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._statistics import Scales, Sharing
from jaxkfac.interception import Traced


def check_marked(
    traced: Traced, estimator: Estimator, uncovered: str, loss_terms: int | None
) -> None:
    """Refuse options that do not go with marks, and labels that do not fit them."""
    if loss_terms is not None:
        raise ValueError(
            f"loss_terms={loss_terms} beside jk.mark_outputs, which counts its terms: leave one out"
        )
    if uncovered == "diagonal":
        raise ValueError(
            'uncovered="diagonal" runs each example by itself, which a scalar loss does not show: '
            "give a jk.Objective"
        )
    if estimator.labels is not None and len(estimator.labels) != len(traced.marks):
        raise ValueError(
            f"labels: expected a list with (samples, *targets) for each of the {len(traced.marks)} "
            f"marks, got {len(estimator.labels)}"
        )


def check_scalar_loss(
    estimator: Estimator, sharing: Sharing, scales: Scales, uncovered: str, terms: int | None
) -> None:
    """Refuse what needs a model's outputs, which a scalar loss does not show."""
    wrong = {
        "fisher": (estimator.name, estimator.needs_outputs),
        "sharing": (sharing, sharing != "expand"),
        "scales": (scales, scales != "diagonal"),
    }
    for name, (value, refused) in wrong.items():
        if refused:
            raise ValueError(
                f'{name}="{value}" needs the model\'s outputs: give a jk.Objective, not a '
                "scalar loss, or name them inside the loss with jk.mark_outputs"
            )
    if uncovered == "diagonal":
        raise ValueError('uncovered="diagonal" needs a jk.Objective, not a scalar loss')
    if terms is None or terms < 1:
        raise ValueError(
            f"loss_terms={terms}: expected the number of rows that the loss is the mean of, or "
            "jk.mark_outputs inside the loss"
        )


def warn_of_sum(loss: Callable[[PyTree], Float[Array, ""]], batch: PyTree) -> bool:
    """Warn of a loss that looks like a sum over rows, where values are known.

    On a third of the rows, on the same rows twice, and three times, a mean stays, and a sum is
    once, twice and three times as large. So is a mean that divides by a constant number of rows, or
    whose weights sum to one: nothing is refused. A sum beside a penalty or noise of dropout is not
    noticed; nor is one whose arrays do not share their leading axis, or that may divide by a scalar
    of the batch.

    Returns:
        Whether there was a warning.
    """
    leaves = jax.tree.leaves(batch)
    sizes = {x.shape[:1] for x in leaves if np.ndim(x)}
    if len(sizes) != 1 or not all(map(np.ndim, leaves)):
        return False
    ((rows,),) = sizes
    some = max(rows // 3, 1)

    def repeated(times: int) -> PyTree:
        def of(x: Array) -> Array:
            return jnp.concatenate([x[:some]] * times)

        return jax.tree.map(of, batch)

    try:
        once, twice, thrice = (float(loss(repeated(times))) for times in (1, 2, 3))
    except Exception:  # a loss may know how many rows it takes; what it raises is not about sums
        return False
    close = 1e-3 * abs(once)
    if not once or abs(twice - 2 * once) > close or abs(thrice - 3 * once) > close:
        return False
    warnings.warn(
        f"the loss looks like a sum over rows, expected a mean: on {some} rows of the batch it is "
        f"{once:.6g}, and on the same rows twice {twice:.6g}. Divide a sum by the number of its "
        "rows, or G is too large by its square. If the loss is a mean that divides by a constant, "
        "or whose weights sum to one, nothing is wrong",
        UserWarning,
        stacklevel=2,
    )
    return True
