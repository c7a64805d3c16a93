"""What a scalar loss cannot give, and what one that marks its outputs cannot."""

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


def refuse_sum(loss: Callable[[PyTree], Float[Array, ""]], batch: PyTree) -> None:
    """Refuse a loss that is a sum over rows, not a mean, where values are known.

    On a third of the rows, on the same rows twice, and three times, a mean stays, and a sum is
    once, twice and three times as large. A loss that is neither (a sum beside a penalty, noise of
    dropout, a constant number of rows) is not noticed; nor is one whose arrays do not share their
    leading axis.

    Raises:
        ValueError: the loss is a sum.
    """
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch) if np.ndim(x)}
    if len(sizes) != 1:
        return
    ((rows,),) = sizes
    some = max(rows // 3, 1)

    def repeated(times: int) -> PyTree:
        def of(x: Array) -> Array:
            return jnp.concatenate([x[:some]] * times) if np.ndim(x) else x

        return jax.tree.map(of, batch)

    try:
        once, twice, thrice = (float(loss(repeated(times))) for times in (1, 2, 3))
    except Exception:  # a loss may know how many rows it takes; what it raises is not about sums
        return
    close = 1e-3 * abs(once)
    if once and abs(twice - 2 * once) <= close and abs(thrice - 3 * once) <= close:
        raise ValueError(
            f"the loss is a sum over rows, expected a mean: on {some} rows of the batch it is "
            f"{once:.6g}, and on the same rows twice {twice:.6g}. Divide it by their number, or G "
            "is too large by its square"
        )
