"""Sums of so many batches that float32 would lose them."""

import dataclasses
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp

from jaxkfac.factors._origin import check_same_origin

Summed = TypeVar("Summed")
# A plain sum of so many alike terms may have lost 1e-5: each addition rounds by 2**-24 of what
# there is by then, which is half of the whole on average.
PLAIN_TERMS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LongSum(Generic[Summed]):
    r"""A sum that also keeps what each addition rounds off, for very many terms.

    A plain float32 sum of $n$ alike terms rounds each to a multiple of the sum's last digit,
    which after $n$ terms is up to $n \varepsilon$ of one: of 200,000 batches 1 % may be lost, in
    the same direction each time. Here the error stays near $\varepsilon$ whatever $n$ is. An
    average with a decay $\beta$ needs none of this: it is a sum of $1 / (1 - \beta)$ terms.

    Build it with :meth:`zeros`, then add: ``total = total + factors``. The structure stays, so
    it can be the carry of a ``scan``.

    Attributes:
        total: The sum.
        rounded: What ``total`` is too large by, in the same structure.

    Memory:
        Twice that of what is summed; under ``jit`` with a donated sum nothing beyond it.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> total = jk.LongSum.zeros(stats.factor_shapes(params, batch))
        >>> add = lambda i, total: total + stats(params, batch).factors
        >>> total = jax.lax.fori_loop(0, 200, add, total).total
        >>> total.terms, total["kernel"].g[0].round(5)
        (Array(600., dtype=float32), Array([1., 1.], dtype=float32))

    References:
        Kahan, Further remarks on reducing truncation errors, 1965.
    """

    total: Summed
    rounded: Any

    @classmethod
    def zeros(cls, shapes: Summed) -> "LongSum[Summed]":
        """A sum of nothing.

        Args:
            shapes: Factors, the ``corrections`` of corrected eigenbases, or any tree of arrays
                that combine by adding; or their shapes.
        """
        nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return cls(nothing(), nothing())

    def __add__(self, new: Summed) -> "LongSum[Summed]":
        """The sum with one more term, rounded to the sum's dtypes."""
        origins = [getattr(x, "origin", None) for x in (self.total, new)]
        if origins[0] != origins[1]:  # of factors
            check_same_origin("factors", *origins)
            new = dataclasses.replace(cast(Any, new), origin=origins[0])
        owed = jax.tree.map(lambda x, r: x.astype(r.dtype) - r, new, self.rounded)
        total = jax.tree.map(jnp.add, self.total, owed)
        gained = jax.tree.map(jnp.subtract, total, self.total)
        return LongSum(total, jax.tree.map(jnp.subtract, gained, owed))
