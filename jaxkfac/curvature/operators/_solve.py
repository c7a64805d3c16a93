"""Linear solves by preconditioned conjugate gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxkfac._arguments import ArrayTree, with_leaves
from jaxkfac._errors import at_least_one
from jaxkfac.curvature.operators._operator import (
    Operator,
    as_outside,
    check_number,
    full_precision,
    load,
)
from jaxkfac.linalg import statistics_dtype

Leaves = dict[str, Array]


class Solution(NamedTuple):
    """The result of :func:`solve`.

    Attributes:
        solution: A tree like the right-hand side.
        num_steps: Steps taken; each takes one product with the operator and one with the
            preconditioner.
        residual_norm: Euclidean norm of ``rhs - (operator + damping) @ solution``, recomputed
            at the end.
        converged: Whether that norm is at most twice the tolerance. The iteration stops by its own
            recurrence, and rounding makes the true residual drift from it.
    """

    solution: ArrayTree
    num_steps: Int[Array, ""]
    residual_norm: Float[Array, ""]
    converged: Bool[Array, ""]


def solve(
    operator: Operator,
    rhs: ArrayTree,
    *,
    damping: Any = 0.0,
    preconditioner: Operator | None = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    max_steps: int = 1000,
) -> Solution:
    r"""Solve $(A + \delta) x = b$ by conjugate gradients.

    The iteration, ``lineax.CG``, stops when $\lVert b - (A + \delta) x \rVert \le
    \max(\text{rtol} \lVert b \rVert, \text{atol})$. For a damped Fisher, the inverse of its
    Kronecker approximation is a preconditioner:
    ``jk.operators.kronecker(bases, power=-1.0, damping=damping)``.

    Args:
        operator: A positive semi-definite operator; with ``damping``, positive definite on ``rhs``.
        rhs: $b$, a tree shaped like ``operator.like``. Leaves without a gradient pass
            unchanged.
        damping: $\delta \ge 0$, in the operator's units; may be traced.
        preconditioner: A positive definite operator close to $(A + \delta)^{-1}$.
        rtol: Relative tolerance, at least a few times the rounding of the dtype.
        atol: Absolute tolerance, in the units of ``rhs``.
        max_steps: Largest number of steps, static.

    Returns:
        A :class:`Solution`. Nothing is raised for a singular or indefinite operator, for which
        the iteration may not converge: check ``converged``.

    Raises:
        ImportError: ``lineax`` is not installed.
        ValueError: a tree that does not fit the operator, or options out of range.

    Memory:
        Six trees like ``rhs`` in at least float32, besides the memory of the products.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 4.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(3))
        >>> found = jk.operators.solve(operator, jnp.ones(3), damping=1.0)
        >>> print(found.solution.round(4), found.num_steps, found.converged)
        [0.5    0.3333 0.25  ] 3 True

    References:
        Magnus Hestenes and Eduard Stiefel, "Methods of Conjugate Gradients for Solving Linear
        Systems", 1952.
    """
    if rtol < 0 or atol < 0 or (rtol == 0 and atol == 0):
        raise ValueError(f"rtol={rtol}, atol={atol}: expected neither negative, one positive")
    at_least_one(max_steps=max_steps)
    check_number("damping", damping)
    damped = operator.damped(damping)
    rhs_leaves = damped.check(rhs)
    if preconditioner is not None:
        preconditioner.check(rhs)
    dtype = statistics_dtype(*(x.dtype for x in rhs_leaves.values()))
    b = {path: x.astype(dtype) for path, x in rhs_leaves.items()}
    x, steps = _iterate(damped, b, preconditioner, rtol, atol, max_steps=max_steps)
    applied = damped.product(x)
    residual = _norm({path: b[path] - applied[path].astype(dtype) for path in b})
    tolerance = jnp.maximum(rtol * _norm(b), jnp.asarray(atol, dtype))
    solution = with_leaves(
        rhs, {path: x[path].astype(leaf.dtype) for path, leaf in rhs_leaves.items()}
    )
    return Solution(solution, steps, residual, residual <= 2 * tolerance)


@functools.partial(jax.jit, static_argnames="max_steps")
def _iterate(
    operator: Operator,
    b: Leaves,
    preconditioner: Operator | None,
    rtol: ArrayLike,
    atol: ArrayLike,
    *,
    max_steps: int,
) -> tuple[Leaves, Array]:
    r"""``lineax.CG`` on a rescaled system: the solution and the number of steps.

    ``lineax.CG`` treats a direction $p$ as singular if $p^\top A p$ is below about $200 n \epsilon$
    times the residual's norm. That bound is absolute, and the curvature of a large model in float32
    is always below it. It also wants the step in $x$ below the same absolute tolerance as the
    residual. Neither makes sense in the units of a loss. So here the right-hand side has norm 1,
    the preconditioner is scaled to make its first inner product 1, and the operator to make its
    first $2^{60}$, far above the bound. The solution is then so small that the second condition
    always holds. The factors are powers of two, so nothing is rounded.
    """
    lineax = load("lineax")

    @as_outside
    def apply(operator: Operator | None, vector: Leaves) -> Leaves:
        if operator is None:
            return vector
        out = operator.product(vector)
        return {path: out[path].astype(x.dtype) for path, x in vector.items()}

    length = _power_of_two(_norm(b))
    unit = _times(1 / length, b)
    first = apply(preconditioner, unit)
    inner = _power_of_two(_dot(first, unit))
    first = _times(1 / inner, first)
    stretch = 2.0**60 / _power_of_two(_dot(first, apply(operator, first)))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), b)
    definite = lineax.positive_semidefinite_tag
    matrix = lineax.FunctionLinearOperator(
        lambda v: _times(stretch, apply(operator, v)), like, definite
    )
    inverse = lineax.FunctionLinearOperator(
        lambda v: _times(1 / inner, apply(preconditioner, v)), like, definite
    )
    tolerance = jnp.maximum(rtol * _norm(unit), atol / length)
    with full_precision():
        solution = lineax.linear_solve(
            matrix,
            unit,
            lineax.CG(rtol=0.0, atol=tolerance, norm=_norm, max_steps=max_steps),
            options={"preconditioner": inverse},
            throw=False,
        )
    # What was solved is stretch A y = b / length.
    x = jax.tree.map(lambda v: v * stretch * length, solution.value)
    return x, jnp.asarray(solution.stats["num_steps"])


def _dot(x: Leaves, y: Leaves) -> Array:
    return sum(jnp.vdot(x[path], y[path], precision="highest") for path in x)  # pyright: ignore[reportReturnType]


def _norm(x: Leaves) -> Array:
    return jnp.sqrt(_dot(x, x))


def _times(factor: Array, x: Leaves) -> Leaves:
    return {path: leaf * factor for path, leaf in x.items()}


def _power_of_two(x: Array) -> Array:
    """The power of two at or above half of ``abs(x)``; 1 if ``x`` is 0 or not finite."""
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(x), x, 1))
    return jnp.where(x == 0, 1, jnp.ldexp(jnp.ones((), x.dtype), exponent - 1))
