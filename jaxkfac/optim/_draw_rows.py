"""Rows drawn in proportion to their residuals, with weights that keep sums unbiased."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jaxkfac._arguments import ArrayTree, check_arrays, check_function
from jaxkfac._errors import at_least_one, check_key, scalar
from jaxkfac.optim._trees import checked_state


class RowPoolState(NamedTuple):
    """State of :func:`draw_rows`.

    Attributes:
        step: Draws so far, int32.
        pool: The rows from which is drawn, a tree of arrays ``(M, ...)``.
        sizes: ``(M,)``: the sizes of their residuals at the last refresh, float32.
    """

    step: Int[Array, ""]
    pool: ArrayTree
    sizes: Float[Array, " M"]


class DrawnRows(NamedTuple):
    r"""Rows that were drawn.

    Attributes:
        rows: The rows, a tree of arrays ``(number, ...)``.
        weights: ``(number,)``: $1 / (M p)$, the weights of their loss terms, float32.
        indices: ``(number,)``: their places in the pool, int32.
    """

    rows: ArrayTree
    weights: Float[Array, " number"]
    indices: Int[Array, " number"]


@dataclasses.dataclass(frozen=True, eq=False)
class RowDraw:
    """Draws rows of a pool; see :func:`draw_rows`."""

    points: Any
    residuals: Callable[[ArrayTree, ArrayTree], Array]
    number: int
    uniform: ArrayLike
    every: int

    def init(self, params: ArrayTree, key: Key[Array, ""]) -> RowPoolState:
        """The state before the first draw, whose pool is drawn with the key.

        Args:
            params: The parameters.
            key: For the pool, if it is a function.

        Raises:
            ValueError: the pool is empty, its arrays differ in their first axis, or ``residuals``
                does not return a number for each row.
        """
        check_arrays("params", params)
        check_key(key)
        pool, sizes = self._refreshed(params, key)
        return RowPoolState(jnp.zeros((), jnp.int32), pool, sizes)

    def draw(
        self, state: Any, params: ArrayTree, key: Key[Array, ""]
    ) -> tuple[DrawnRows, RowPoolState]:
        """Draw rows, and renew the pool before that if it is due. It is pure: jit or scan it.

        Args:
            state: That of ``init`` or of the last draw.
            params: The parameters.
            key: A new key at each draw.

        Returns:
            The rows with their weights, and the state.

        Raises:
            TypeError: ``state`` is not from ``init``, or ``key`` is a seed.
        """
        state = checked_state("draw_rows: the state", state, RowPoolState, "as draw.init gives it")
        check_key(key)
        of_pool, of_rows = jax.random.split(key)
        due = (state.step > 0) & (state.step % self.every == 0)
        old = state.pool, state.sizes
        pool, sizes = jax.lax.cond(due, lambda: self._refreshed(params, of_pool), lambda: old)
        total = sizes.sum()
        some, number = total > 0, len(sizes)
        uniform = jnp.asarray(self.uniform, sizes.dtype)
        sized = sizes / jnp.where(some, total, 1)
        p = jnp.where(some, uniform / number + (1 - uniform) * sized, 1 / number)
        indices, p = _drawn(of_rows, p, self.number)
        rows = jax.tree.map(lambda x: x[indices], pool)
        weights = 1 / (number * p)
        new = RowPoolState(state.step + 1, pool, sizes)
        return DrawnRows(rows, weights, indices), new

    def _refreshed(self, params: ArrayTree, key: Key[Array, ""]) -> tuple[ArrayTree, Array]:
        pool = self.points(key) if callable(self.points) else self.points
        pool = jax.tree.map(jnp.asarray, pool)
        number = _number_of(pool)
        found = jnp.asarray(jax.lax.stop_gradient(self.residuals(params, pool)))
        if found.shape[:1] != (number,):
            raise ValueError(
                f"draw_rows: residuals returned shape {found.shape}, expected ({number}, ...), "
                "a number or vector for each row of the pool"
            )
        sizes = found.astype(jnp.float32).reshape(number, -1)
        sizes = jnp.abs(sizes[:, 0]) if sizes.shape[1] == 1 else jnp.linalg.norm(sizes, axis=1)
        # A row whose residual is not finite is drawn with the uniform share alone.
        return pool, jnp.where(jnp.isfinite(sizes), sizes, 0)


def _drawn(
    key: Key[Array, ""], p: Float[Array, " M"], number: int
) -> tuple[Int[Array, " number"], Float[Array, " number"]]:
    """Indices, one from each of equal shares of the distribution, and their probabilities."""
    ends = jnp.cumsum(p)
    offsets = jax.random.uniform(key, (number,), p.dtype)
    at = (jnp.arange(number, dtype=p.dtype) + offsets) / number * ends[-1]
    indices = jnp.searchsorted(ends, at, side="right").clip(0, len(p) - 1).astype(jnp.int32)
    return indices, p[indices] / ends[-1]


def _number_of(pool: ArrayTree) -> int:
    """The number of rows of a pool."""
    sizes = {x.shape[:1] for x in jax.tree.leaves(pool)}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ValueError(
            "draw_rows: points: expected a tree of arrays with one leading axis of rows, got "
            f"leading axes {sorted(sizes)}"
        )
    ((number,),) = sizes
    return number


def draw_rows(
    points: Any,
    residuals: Callable[[ArrayTree, ArrayTree], Array],
    number: int,
    *,
    uniform: float = 0.1,
    every: int = 10,
) -> RowDraw:
    r"""Minibatches whose rows are drawn where the residuals are large, for any optimizer.

    Of $M$ rows of a pool, row $j$ is drawn with probability

    $$ p_j = \frac{u}{M} + (1 - u) \frac{|r_j|}{\sum_i |r_i|}, $$

    one row from each of ``number`` equal shares of this distribution, and gets the weight
    $w_j = 1 / (M p_j)$. With $n$ drawn rows, $\frac1n \sum_j w_j f_j$ is an unbiased estimate of
    the mean of any $f$ over the pool: of the loss, of its gradient, and of the curvature
    $\sum_j w_j J_j J_j^\top$. The inverse of a sampled matrix, and so a step that solves with it,
    is not unbiased. Divide by the number of rows, not by the sum of the weights:
    ``jk.Objective(..., normalize="count")`` with the weights as its mask does; in a loss that you
    write yourself, multiply residuals by the root of their weights.

    A minibatch of points misses a shock that few of them see, and a fixed set of points is
    overfitted: a function ``points`` draws new ones at each refresh.

    Args:
        points: The pool, a tree of arrays ``(M, ...)``, or a function of a key that draws such a
            tree, of equal shapes at each call.
        residuals: ``residuals(params, pool)``, ``(M,)`` or ``(M, ...)``, the size of which decides;
            called at each refresh.
        number: Rows of a minibatch, $n$.
        uniform: $0 < u \le 1$, the share that is drawn uniformly. No weight is above $1 / u$.
        every: Draws from one refresh of pool and residuals to the next, at least 1.

    Returns:
        An object with ``init(params, key)`` and ``draw(state, params, key)``.

    Raises:
        ValueError: when built, for a number out of range. ``init`` and ``draw`` say what they
            raise.

    Memory:
        The state holds the pool and one number for each of its rows.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> residual = lambda params, x: params["a"] * x**8 - x
        >>> draw = jk.draw_rows(lambda key: jax.random.uniform(key, (1000,)), residual, 100)
        >>> params = {"a": jnp.ones(())}
        >>> state = draw.init(params, jax.random.key(0))
        >>> (x, weights, _), state = draw.draw(state, params, jax.random.key(1))
        >>> loss = lambda p: 0.5 * (weights * residual(p, x) ** 2).mean()
        >>> whole = 0.5 * (residual(params, state.pool) ** 2).mean()
        >>> print(x.shape, bool(abs(loss(params) / whole - 1) < 0.1))
        (100,) True

    References:
        Mohammad Amin Nabian, Rini Gladstone and Hadi Meidani, "Efficient training of
        physics-informed neural networks via importance sampling", 2021.
    """
    check_function("residuals", residuals, "residuals(params, pool)")
    at_least_one(number=number, every=every)
    scalar("uniform", uniform, "a number in (0, 1]")
    if not 0 < float(uniform) <= 1:
        raise ValueError(f"uniform must be above 0 and at most 1, got {uniform}")
    if not callable(points):
        check_arrays("points", points)
        _number_of(jax.tree.map(jnp.asarray, points))
    return RowDraw(points, residuals, number, uniform, every)
