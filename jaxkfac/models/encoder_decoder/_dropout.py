"""Dropout by a key that is given with each call: without one nothing is dropped."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


class Dropout(NamedTuple):
    r"""Inverted dropout: a number stays with probability $1 - p$, and is then divided by it.

    The expectation of what is dropped is what was given. Without a key, or at rate 0, it is what
    was given itself.

    Attributes:
        rate: The probability $p$, in [0, 1).
        key: For this place; ``None`` drops nothing.

    References:
        N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov: Dropout: a simple
        way to prevent neural networks from overfitting. JMLR 15, 2014.
    """

    rate: float | int = 0.0
    key: Key[Array, "*places"] | None = None

    @property
    def is_off(self) -> bool:
        """Whether nothing is dropped."""
        return self.key is None or self.rate == 0

    def at(self, place: int) -> "Dropout":
        """For one of several places, each of which draws numbers of its own."""
        if self.is_off:
            return Dropout()
        assert self.key is not None
        return self._replace(key=jax.random.fold_in(self.key, place))

    def split(self, count: int) -> tuple[Key[Array, " count"], ...]:
        """Keys of so many places as a stacked input of a scan; no input where nothing drops.

        They are those of :meth:`at`: ask one object for either.
        """
        if self.is_off:
            return ()
        assert self.key is not None
        return (jax.random.split(self.key, count),)

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        if self.is_off:
            return x
        assert self.key is not None
        keep = 1 - self.rate
        kept = jax.random.bernoulli(self.key, keep, x.shape)
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32  # 0.9 is 0.898 in bfloat16
        scaled = (x.astype(wide) / jnp.asarray(keep, wide)).astype(x.dtype)
        return jnp.where(kept, scaled, jnp.zeros((), x.dtype))


NO_DROPOUT = Dropout()


def check_rate(rate: float | int) -> float | int:
    """The rate.

    Raises:
        ValueError: it is no probability in [0, 1).
    """
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < 1:
        raise ValueError(f"dropout={rate!r}: expected a probability in [0, 1)")
    return rate
