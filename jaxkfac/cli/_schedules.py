"""Learning rates over a run."""

from typing import Literal, get_args

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._errors import one_of

Shape = Literal["cosine", "linear", "constant"]


def warmup_schedule(
    peak: float, warmup: float, num_updates: int, shape: Shape = "cosine"
) -> optax.Schedule:
    """Up to ``peak`` along a line in the first part, then to zero, or for ever.

    Written out because optax's schedules mix dtypes, which strict promotion refuses.

    Args:
        peak: Largest learning rate.
        warmup: Part of the updates in which it rises, in [0, 1).
        num_updates: Of the run.
        shape: How it falls: along a cosine, a line, or not at all.
    """
    one_of("shape", shape, get_args(Shape))
    rising = min(round(warmup * num_updates), num_updates - 1)

    def schedule(step: ArrayLike) -> Array:
        step = jnp.asarray(step, jnp.float32)
        up = (step + 1) / max(rising, 1)
        fallen = jnp.clip((step - rising) / (num_updates - rising), 0.0, 1.0)
        if shape == "cosine":
            left = 0.5 * (1 + jnp.cos(jnp.pi * fallen))
        else:
            left = 1 - fallen if shape == "linear" else jnp.ones_like(fallen)
        return peak * jnp.where(step < rising, up, left)

    return schedule
