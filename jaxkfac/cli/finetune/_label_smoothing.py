"""Label smoothing whose Fisher stays the model's."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

import jaxkfac as jk
from jaxkfac.linalg import statistics_dtype

Outputs = Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class SmoothedCategorical(jk.Categorical):
    r"""Cross entropy with $(1 - \epsilon)$ at the target and $\epsilon / K$ at all K classes.

    Labels that the model samples stand for its own distribution, and are not smoothed: they come
    as $-1 - k$ for class k, and ``terms`` is then the plain cross entropy.

    Args:
        smoothing: $\epsilon$ in [0, 1).
    """

    smoothing: float = 0.0

    def check(self, outputs: Outputs, targets: Array, mask: Array | None = None) -> None:
        super().check(outputs, _classes(targets), mask)

    def terms(self, outputs: Float[Array, "*terms c"], targets: Array) -> Float[Array, "*terms"]:
        plain = super().terms(outputs, _classes(targets))
        wide = outputs.astype(statistics_dtype(outputs.dtype))
        uniform = jax.nn.logsumexp(wide, -1) - wide.mean(-1)
        share = jnp.where(targets < 0, 0.0, self.smoothing).astype(plain.dtype)
        return plain + share * (uniform.astype(plain.dtype) - plain)

    def sample(self, key: Key[Array, ""], outputs: Float[Array, "*terms c"]) -> Array:
        return -1 - super().sample(key, outputs)


def _classes(targets: Array) -> Array:
    return jnp.where(targets < 0, -1 - targets, targets)
