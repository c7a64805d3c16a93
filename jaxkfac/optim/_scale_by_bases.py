"""Preconditioning with eigenbases that are passed in at every step."""

from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import one_of
from jaxkfac.curvature import Eigenbases, Missing, apply_power, check_bases, covered_indices
from jaxkfac.linalg.spectral import Damping, DampingMode
from jaxkfac.optim._schedules import Schedule, at_step, check_scheduled_damping
from jaxkfac.optim._trees import check_some_covered, checked_state


class ScaleByBasesState(NamedTuple):
    """State of :func:`scale_by_bases`.

    Attributes:
        step: Updates made so far, int32; a damping schedule reads it.
    """

    step: Int[Array, ""]


def scale_by_bases(
    damping: Damping | Schedule | tuple[Any, Any],
    *,
    damping_mode: DampingMode = "exact",
    missing: Missing = "identity",
) -> optax.GradientTransformationExtraArgs:
    r"""Scale gradients by $(F + \delta)^{-1}$, with $F$ given by eigenbases at every step.

    The bases come from :func:`jaxkfac.curvature.eigendecompose` or from a
    ``HostCurvature``. The sign is kept, so chain a learning rate behind it.

    Args:
        damping: $\delta \ge 0$, added to the curvature of the mean loss, in units of its squared
            gradient, or a pair ``(damping_a, damping_g)`` in the units of each factor; numbers or
            schedules.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``.
        missing: What to do with parameters that no layer covers: ``"identity"`` keeps
            their gradient, ``"zero"`` freezes them, ``"raise"`` names them.

    Returns:
        A transformation used as ``tx.update(grads, state, params, bases=bases)``. Bases
        or gradients that are not finite propagate to the updates. Wrap what follows in
        ``optax.apply_if_finite`` to leave such steps out and count them; around the full
        chain it would check only the gradients.

    Raises:
        ValueError: when built, for a negative damping or an unknown option; in
            ``update``, if ``bases`` is missing.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> import optax
        >>> tx = optax.chain(jk.scale_by_bases(damping=1.0), optax.sgd(0.1))
        >>> bases, state = jk.eigendecompose(factors), tx.init(params)
        >>> updates, state = tx.update(grads, state, params, bases=bases)
        >>> print(updates["kernel"][0].round(3))
        [-0.02 -0.02]
    """
    check_scheduled_damping(damping, damping_mode)
    one_of("missing", missing, get_args(Missing))

    def init(params: ArrayTree) -> ScaleByBasesState:
        del params
        return ScaleByBasesState(step=jnp.zeros((), jnp.int32))

    def update(
        updates: ArrayTree,
        state: Any,
        params: ArrayTree | None = None,
        *,
        bases: Eigenbases | None = None,
        **extra: Any,
    ) -> tuple[ArrayTree, ScaleByBasesState]:
        del params, extra
        if bases is None:
            raise ValueError("scale_by_bases needs bases: tx.update(grads, state, bases=bases)")
        check_bases(bases)
        state = checked_state("scale_by_bases: the state", state, ScaleByBasesState)
        check_some_covered("grads", updates, covered_indices(bases.layers), "bases=")
        scaled = apply_power(
            updates,
            bases,
            -1.0,
            damping=at_step(damping, state.step),
            damping_mode=damping_mode,
            missing=missing,
        )
        return scaled, ScaleByBasesState(step=jnp.asarray(optax.safe_increment(state.step)))

    return optax.GradientTransformationExtraArgs(init, update)
