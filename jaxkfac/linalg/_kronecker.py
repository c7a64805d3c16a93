"""Kronecker-structured operators on matrices, and their damped powers. Arrays only."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

# ---------------- kronecker-structured operators on matrices, in arrays only
#
# A layer's matrix $W$ is ``(stack..., in, out)``; its curvature block is $A \otimes G$, which
# acts as $W \mapsto A W G$. In the eigenbases $A = Q_A \Lambda_A Q_A^\top$ and
# $G = Q_G \Lambda_G Q_G^\top$ it is an elementwise product.


_EXACT = jax.lax.Precision.HIGHEST  # never TF32: these products are divided by eigenvalues


def into_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack _ _"]:
    r"""$Q_A^\top W Q_G$; ``None`` is the identity (a diagonal side)."""
    if a_vectors is not None:
        matrix = jnp.matmul(_widened(a_vectors, matrix).mT, matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, _widened(g_vectors, matrix), precision=_EXACT)
    return matrix


def out_of_eigenbasis(
    matrix: Float[Array, "*stack r_in r_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack _ _"]:
    r"""$Q_A W Q_G^\top$, the inverse of :func:`into_eigenbasis`."""
    if a_vectors is not None:
        matrix = jnp.matmul(_widened(a_vectors, matrix), matrix, precision=_EXACT)
    if g_vectors is not None:
        matrix = jnp.matmul(matrix, _widened(g_vectors, matrix).mT, precision=_EXACT)
    return matrix


def scale_in_eigenbasis(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack n_in n_out"]:
    r"""$Q_A (S \odot Q_A^\top W Q_G) Q_G^\top$: any function of $A \otimes G$ applied to $W$.

    Args:
        matrix: $W$.
        scale: $S$, the operator's eigenvalue for each element, as
            :func:`jaxkfac.linalg.kronecker_power` gives it.
        a_vectors: $Q_A$, eigenvectors in columns, or ``None`` for the identity. Fewer columns
            than rows are the last ones of a basis: every direction beside them has the scale
            of the first, ``scale[..., 0, :]``.
        g_vectors: $Q_G$, likewise.

    Returns:
        A matrix like ``matrix``; products run at the highest precision of the dtype.
    """
    if not _is_truncated(a_vectors):
        rotated = into_eigenbasis(matrix, a_vectors, None)
        return out_of_eigenbasis(_scale_outputs(rotated, scale, g_vectors), a_vectors, None)
    # The rest I - Q Q' has one scale, under which W as a whole is taken; what that is wrong by
    # lies in the columns of Q.
    assert a_vectors is not None
    rest = scale[..., :1, :]
    rotated = into_eigenbasis(matrix, a_vectors, None)
    kept = scale[..., -rotated.shape[-2] :, :]
    inside = _scale_outputs(rotated, kept, g_vectors) - _scale_outputs(rotated, rest, g_vectors)
    return _scale_outputs(matrix, rest, g_vectors) + out_of_eigenbasis(inside, a_vectors, None)


def quadratic_form(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack"]:
    r"""$\langle W, Q_A (S \odot Q_A^\top W Q_G) Q_G^\top \rangle$: what
    :func:`scale_in_eigenbasis` gives, multiplied with the matrix itself.

    In the eigenbasis it is a weighed sum of squares, so that nothing is rotated back.

    Args:
        matrix: $W$.
        scale: $S$, as for :func:`scale_in_eigenbasis`.
        a_vectors: $Q_A$, likewise.
        g_vectors: $Q_G$, likewise.
    """
    if _is_truncated(a_vectors) or _is_truncated(g_vectors):
        found = matrix * scale_in_eigenbasis(matrix, scale, a_vectors, g_vectors)
    else:
        found = jnp.square(into_eigenbasis(matrix, a_vectors, g_vectors)) * scale
    return found.sum((-2, -1))


def _scale_outputs(matrix: Array, scale: Array, vectors: Array | None) -> Array:
    """The same on the right alone: rows are in their eigenbasis already."""
    rotated = into_eigenbasis(matrix, None, vectors)
    if not _is_truncated(vectors):
        return out_of_eigenbasis(rotated * scale, None, vectors)
    rest, kept = scale[..., :1], scale[..., -rotated.shape[-1] :]
    return matrix * rest + out_of_eigenbasis(rotated * (kept - rest), None, vectors)


def _is_truncated(vectors: Array | None) -> bool:
    return vectors is not None and vectors.shape[-1] < vectors.shape[-2]


def from_spectrum(
    values: Float[Array, "*stack n"], vectors: Float[Array, "*stack n r"]
) -> Float[Array, "*stack n n"]:
    r"""$Q \operatorname{diag}(\lambda) Q^\top$; directions beside $Q$ have the first eigenvalue."""
    vectors = _widened(vectors, values)
    if _is_truncated(vectors):
        rest, kept = values[..., :1], values[..., -vectors.shape[-1] :]
        identity = jnp.eye(values.shape[-1], dtype=values.dtype)
        inside = jnp.matmul(vectors * (kept - rest)[..., None, :], vectors.mT, precision=_EXACT)
        return rest[..., None] * identity + inside
    return jnp.matmul(vectors * values[..., None, :], vectors.mT, precision=_EXACT)


def _widened(vectors: Array, like: Array) -> Array:
    """Eigenvectors may be stored in fewer bits; the arithmetic has those of what they rotate."""
    return jnp.asarray(vectors, like.dtype)


# ---------------- damped powers of Kronecker-structured eigenvalues


DampingMode = Literal["exact", "factored", "pi"]
Damping = ArrayLike | tuple[ArrayLike, ArrayLike]

_SMALL_ROOT = 2.0**-20  # its fourth power, times what a condition number leaves, is in range


class ScaledPower(NamedTuple):
    """A power of eigenvalues in range: each is ``values * root * root``.

    Attributes:
        values: ``(stack..., in, out)``, of eigenvalues whose largest is near 1.
        root: ``(stack..., 1, 1)``: the same power of a power of two near the square root of the
            largest. A matrix is multiplied by it before and after, exactly for integer powers.
    """

    values: Array
    root: Array

    @property
    def product(self) -> Array:
        """The powers themselves, 0 or infinite where the dtype does not reach."""
        return self.values * self.root * self.root


def check_damping(damping: Any, mode: str) -> None:
    """Refuse an unknown mode and, where its value is known, a negative or NaN damping.

    A traced damping cannot be looked at and passes.

    Raises:
        ValueError: naming the argument and its value.
    """
    if mode not in get_args(DampingMode):
        raise ValueError(
            f"damping_mode must be one of {get_args(DampingMode)}, got {mode!r}; for one "
            "damping per factor pass damping=(damping_a, damping_g)"
        )
    parts = damping if isinstance(damping, tuple) else (damping,)
    if isinstance(damping, tuple) and len(parts) != 2:
        raise ValueError(f"a pair is damping=(damping_a, damping_g), got {len(parts)} values")
    for part in parts:
        if np.shape(part) != ():
            raise ValueError(
                f"damping: expected a number, or a pair (damping_a, damping_g) as a tuple, got "
                f"shape {np.shape(part)}"
            )
        if not isinstance(part, Tracer) and not float(part) >= 0:
            raise ValueError(f"damping must be zero or positive, got {damping}")


def power_or_zero(values: Float[Array, "*shape"], power: float) -> Float[Array, "*shape"]:
    """``values**power``, with 0 for 0 at every power: the pseudo-inverse's convention."""
    exponent = int(power) if math.isfinite(power) and power == int(power) else power
    zero = values == 0
    return jnp.where(zero, 0, jnp.where(zero, 1, values) ** exponent)


def kronecker_power(
    a_values: Float[Array, "*stack n_in"],
    g_values: Float[Array, "*stack n_out"],
    *,
    power: float,
    damping: Damping = 0.0,
    mode: DampingMode = "exact",
    kept: Bool[Array, "*stack n_in n_out"] | None = None,
) -> ScaledPower:
    r"""Eigenvalues of the damped power of $A \otimes G$, one for each element of the matrix.

    Eigenvalues are divided by powers of two near the largest before they are multiplied: where
    rows and gradients are of size 1e-11, $\lambda_A \lambda_G$ of 1e-44 is less than float32
    holds, and its inverse more. Nothing else changes, not by a bit for integer powers.

    With $\delta$ the damping and $p$ the power,

    * exact: $(\lambda_A \lambda_G + \delta)^p$
    * factored: $((\lambda_A + \sqrt\delta)(\lambda_G + \sqrt\delta))^p$
    * pi: $((\lambda_A + \pi\sqrt\delta)(\lambda_G + \sqrt\delta/\pi))^p$ with
      $\pi^2 = \overline{\lambda_A} / \overline{\lambda_G}$, the ratio of the mean
      eigenvalues, or 1 where either mean is 0
    * a pair $(\delta_A, \delta_G)$: $((\lambda_A + \delta_A)(\lambda_G + \delta_G))^p$,
      whatever the mode

    Args:
        a_values: Eigenvalues of the input factor; negative ones count as 0.
        g_values: Eigenvalues of the output factor, same dtype and stack.
        power: $p$, static. A damped eigenvalue of 0 gives 0 at every power.
        damping: $\delta \ge 0$ in units of $\lambda_A\lambda_G$, or a pair in the units of
            each factor; may be traced.
        mode: How one damping is spread over the two factors.
        kept: False where the eigenvalue counts as 0 whatever its value and the damping,
            see :func:`jaxkfac.linalg.kronecker_above_rcond`; ``None`` keeps all.

    Returns:
        The power of every element in the eigenbasis, dtype of ``a_values``.

    Raises:
        ValueError: unknown mode or negative damping.

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015, section 6.3 (the factored forms).
    """
    check_damping(damping, mode)
    a, g = jnp.maximum(a_values, 0), jnp.maximum(g_values, 0)
    if not isinstance(damping, tuple) and mode == "exact":
        delta = jnp.asarray(damping, a.dtype)
        (a, of_a), (g, of_g) = _near_one(a, -1), _near_one(g, -1)
        of_product = (of_a * of_g)[..., None]
        # Of the damping where that is larger: the eigenvalues are lost beside it either way.
        root = jnp.maximum(of_product, _root(delta))
        shrink = of_product / root
        damped = a[..., :, None] * g[..., None, :] * shrink * shrink + delta / root / root
        values = power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
        return ScaledPower(values, power_or_zero(root, power))
    to_a, to_g = _per_factor(a, g, damping, mode)
    (a, of_a), (g, of_g) = _near_one(a + to_a, -1), _near_one(g + to_g, -1)
    # Raised before they are multiplied: n_in + n_out powers instead of n_in * n_out.
    a, g = power_or_zero(a, power), power_or_zero(g, power)
    values = a[..., :, None] * g[..., None, :]
    root = power_or_zero((of_a * of_g)[..., None], power)
    return ScaledPower(values if kept is None else jnp.where(kept, values, 0), root)


def _near_one(values: Array, axes: int | tuple[int, int]) -> tuple[Array, Array]:
    """Values divided by the square of a power of two, so that the largest is near 1, and it."""
    root = _root(values.max(axes, keepdims=True))
    root = jnp.where(root > 0, root, 1)
    return values / root / root, root  # in turn: the square may be out of range


def _root(x: Array) -> Array:
    """A power of two near the square root; 0 of 0, and 1 where there is none."""
    bits = jnp.finfo(x.dtype).nexp
    root = jax.lax.reduce_precision(jnp.sqrt(x), exponent_bits=bits, mantissa_bits=0)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(root), root, 1))


def block_root(
    a_values: Float[Array, "*stack n_in"], g_values: Float[Array, "*stack n_out"]
) -> Float[Array, "*stack 1 1"]:
    r"""A power of two near the root of the largest $\lambda_A \lambda_G$, to measure squares in.

    Squares of gradients of size 1e-22 are less than float32 holds. Measured in units of the
    square of this root they are near 1. It is 1 where they are in range as they are.
    """
    of_a, of_g = (_near_one(jnp.maximum(x, 0), -1)[1] for x in (a_values, g_values))
    root = (of_a * of_g)[..., None]
    in_range = (root > 0) & (root >= _SMALL_ROOT) & (root <= 1 / _SMALL_ROOT)
    return jnp.where(in_range | (root == 0), 1, root)


def measured_power(
    values: Float[Array, "*stack n_in n_out"],
    root: Float[Array, "*stack 1 1"],
    a_values: Float[Array, "*stack n_in"],
    g_values: Float[Array, "*stack n_out"],
    *,
    power: float,
    damping: Damping = 0.0,
    mode: DampingMode = "exact",
    kept: Bool[Array, "*stack n_in n_out"] | None = None,
) -> ScaledPower:
    r"""The damped power of measured eigenvalues, which are no products.

    They get what each form of damping adds to the products $\lambda_A \lambda_G$ that they
    stand for: $\delta$ in the exact form, and with per-factor dampings (of a pair, or of
    ``"factored"`` and ``"pi"``) $\delta_A \lambda_G + \lambda_A \delta_G + \delta_A \delta_G$.

    Args:
        values: The eigenvalues divided by ``root ** 2``, zero or positive.
        root: As :func:`block_root` gives it.
        a_values: Eigenvalues of the input factor.
        g_values: Eigenvalues of the output factor.
        power: As in :func:`kronecker_power`, like the other arguments.
        damping: Likewise.
        mode: Likewise.
        kept: Likewise.
    """
    check_damping(damping, mode)
    a, g = jnp.maximum(a_values, 0), jnp.maximum(g_values, 0)
    if not isinstance(damping, tuple) and mode == "exact":
        delta = jnp.asarray(damping, a.dtype)
        common = jnp.maximum(root, _root(delta))
        added = delta / common / common
    else:
        to_a, to_g = _per_factor(a, g, damping, mode)
        of_a, of_g = (_near_one(x, -1)[1] for x in (a + to_a, g + to_g))
        to_a, a = (x / of_a / of_a for x in (to_a, a))
        to_g, g = (x / of_g / of_g for x in (to_g, g))
        to_a, a, to_g, g = to_a[..., None], a[..., None], to_g[..., None, :], g[..., None, :]
        of_product = (of_a * of_g)[..., None]
        common = jnp.maximum(root, of_product)
        grow = of_product / common
        added = (to_a * g + a * to_g + to_a * to_g) * grow * grow
    shrink = root / common
    damped = values * shrink * shrink + added
    found, own = _near_one(damped if kept is None else jnp.where(kept, damped, 0), (-2, -1))
    return ScaledPower(
        power_or_zero(found, power), power_or_zero(own, power) * power_or_zero(common, power)
    )


def is_separable(damping: Any, mode: str) -> bool:
    """Whether each factor gets a damping of its own, so that the damped block is a product."""
    return isinstance(damping, tuple) or mode != "exact"


def factor_damping(
    mean_a: Float[Array, "*stack"],
    mean_g: Float[Array, "*stack"],
    *,
    damping: Damping,
    mode: DampingMode,
) -> tuple[Float[Array, "*_"], Float[Array, "*_"]]:
    r"""What a separable damping adds to each factor, ``()`` or ``(stack...)``.

    Args:
        mean_a: The mean eigenvalue of A, which only ``"pi"`` reads.
        mean_g: Likewise of G.
        damping: As for :func:`kronecker_power`.
        mode: ``"factored"`` or ``"pi"``; of a pair any.
    """
    if isinstance(damping, tuple):
        to_a, to_g = (jnp.asarray(d, mean_a.dtype) for d in damping)
        return to_a, to_g
    root = jnp.sqrt(jnp.asarray(damping, mean_a.dtype))
    return (root, root) if mode == "factored" else _pi_split(mean_a, mean_g, root)


def _per_factor(a: Array, g: Array, damping: Damping, mode: Any) -> tuple[Array, Array]:
    """What is added to each factor's eigenvalues, ``()`` or ``(stack..., 1)``."""
    means = a.mean(-1, keepdims=True), g.mean(-1, keepdims=True)
    return factor_damping(*means, damping=damping, mode=mode)


def _pi_split(mean_a: Array, mean_g: Array, root: Array) -> tuple[Array, Array]:
    usable = (mean_a > 0) & (mean_g > 0)
    root_a, root_g = (jnp.sqrt(jnp.where(usable, mean, 1)) for mean in (mean_a, mean_g))
    pi = root_a / root_g  # roots first: the ratio of the means may be out of range
    return root * pi, root / pi


def diagonal_power(
    values: Float[Array, "*shape"],
    *,
    power: float,
    damping: Damping = 0.0,
    kept: Bool[Array, "*shape"] | None = None,
) -> Float[Array, "*shape"]:
    r"""$(\lambda + \delta)^p$ for a block of a single factor: a diagonal, or a lone bias's G.

    There is nothing to spread the damping over, so every mode is the exact one; of a pair
    the second, $\delta_G$, is added, because the block is made of output gradients. Where
    ``kept`` is False the value counts as 0.
    """
    delta = damping[1] if isinstance(damping, tuple) else damping
    damped = jnp.maximum(values, 0) + jnp.asarray(delta, values.dtype)
    return power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
