"""Batch normalisation whose batch is an episode."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class EpisodeNorm(nnx.Module):
    """Batch normalisation over the images and places of each episode by itself.

    With one episode it is batch normalisation as PyTorch has it. With several, no episode sees
    another: a batch of episodes has the gradient of these episodes accumulated, and the mean of
    what they do to the running statistics.

    Attributes:
        mean: Running mean, an ``nnx.BatchStat``, shape ``(features,)``.
        var: Running variance, likewise, of which each part is divided by its count less one.
        use_running_average: Whether the running statistics normalise; ``model.eval()`` and
            ``model.train()`` set it.

    Example:
        >>> norm = EpisodeNorm(3)
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 8, 8, 3))
        >>> norm(4 * x + 1).std().round(2)
        Array(1., dtype=float32)

    References:
        S. Ioffe, C. Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
        Internal Covariate Shift, 2015.
    """

    def __init__(self, features: int, *, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.momentum, self.epsilon = momentum, epsilon
        self.use_running_average = False

    def __call__(self, x: Float[Array, "E *places C"]) -> Float[Array, "E *places C"]:
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            inside = tuple(range(1, x.ndim - 1))
            mean, var = x.mean(inside, keepdims=True), x.var(inside, keepdims=True)
            count = x[0, ..., 0].size
            self._average(self.mean, mean)
            self._average(self.var, var * (count / max(count - 1, 1)))
        # The scale meets rows of data, so that its curvature is that of every place.
        normalised = (x - mean) * jax.lax.rsqrt(var + self.epsilon)
        return normalised * self.scale[...] + self.bias[...]

    def _average(self, running: nnx.BatchStat, new: Array) -> None:
        new = new.mean(range(new.ndim - 1)).astype(running[...].dtype)
        running[...] = self.momentum * running[...] + (1 - self.momentum) * new
