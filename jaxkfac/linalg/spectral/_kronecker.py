"""Kronecker-structured operators on matrices, and their damped powers: arrays only."""

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

# ---------------- operators on matrices
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
        scale: $S$, the operator's eigenvalue for each element, as returned by
            :func:`jaxkfac.linalg.spectral.kronecker_power`.
        a_vectors: $Q_A$, eigenvectors in columns, or ``None`` for the identity. If there are fewer
            columns than rows, they are the last ones of a basis, and every direction outside of
            them has the scale of the first, ``scale[..., 0, :]``.
        g_vectors: $Q_G$, in the same form.

    Returns:
        A matrix like ``matrix``; products run at the highest precision of the dtype.
    """
    if not _is_truncated(a_vectors):
        rotated = into_eigenbasis(matrix, a_vectors, None)
        return out_of_eigenbasis(_scale_outputs(rotated, scale, g_vectors), a_vectors, None)
    # All of W is scaled as in the complement I - Q Q', which has a single scale. The difference to
    # the correct result lies in the columns of Q.
    assert a_vectors is not None
    outside_scale = scale[..., :1, :]
    rotated = into_eigenbasis(matrix, a_vectors, None)
    inside_scale = scale[..., -rotated.shape[-2] :, :]
    inside = _scale_outputs(rotated, inside_scale, g_vectors) - _scale_outputs(
        rotated, outside_scale, g_vectors
    )
    return _scale_outputs(matrix, outside_scale, g_vectors) + out_of_eigenbasis(
        inside, a_vectors, None
    )


def quadratic_form(
    matrix: Float[Array, "*stack n_in n_out"],
    scale: Float[Array, "*stack n_in n_out"],
    a_vectors: Float[Array, "*stack n_in r_in"] | None,
    g_vectors: Float[Array, "*stack n_out r_out"] | None,
) -> Float[Array, "*stack"]:
    r"""$\langle W, Q_A (S \odot Q_A^\top W Q_G) Q_G^\top \rangle$: the product of the matrix with
    the result of :func:`scale_in_eigenbasis`.

    In the eigenbasis it is a weighted sum of squares, so nothing is rotated back.

    Args:
        matrix: $W$.
        scale: $S$, as for :func:`scale_in_eigenbasis`.
        a_vectors: $Q_A$, as for :func:`scale_in_eigenbasis`.
        g_vectors: $Q_G$, as for :func:`scale_in_eigenbasis`.
    """
    if _is_truncated(a_vectors) or _is_truncated(g_vectors):
        products = matrix * scale_in_eigenbasis(matrix, scale, a_vectors, g_vectors)
    else:
        products = jnp.square(into_eigenbasis(matrix, a_vectors, g_vectors)) * scale
    return products.sum((-2, -1))


def _scale_outputs(matrix: Array, scale: Array, vectors: Array | None) -> Array:
    """:func:`scale_in_eigenbasis` on the right alone, for rows that are in their eigenbasis."""
    rotated = into_eigenbasis(matrix, None, vectors)
    if not _is_truncated(vectors):
        return out_of_eigenbasis(rotated * scale, None, vectors)
    outside_scale, inside_scale = scale[..., :1], scale[..., -rotated.shape[-1] :]
    return matrix * outside_scale + out_of_eigenbasis(
        rotated * (inside_scale - outside_scale), None, vectors
    )


def _is_truncated(vectors: Array | None) -> bool:
    return vectors is not None and vectors.shape[-1] < vectors.shape[-2]


def from_spectrum(
    values: Float[Array, "*stack n"], vectors: Float[Array, "*stack n r"]
) -> Float[Array, "*stack n n"]:
    r"""$Q \operatorname{diag}(\lambda) Q^\top$; directions outside $Q$ get the first eigenvalue."""
    vectors = _widened(vectors, values)
    if _is_truncated(vectors):
        outside_values, inside_values = values[..., :1], values[..., -vectors.shape[-1] :]
        identity = jnp.eye(values.shape[-1], dtype=values.dtype)
        inside = jnp.matmul(
            vectors * (inside_values - outside_values)[..., None, :], vectors.mT, precision=_EXACT
        )
        return outside_values[..., None] * identity + inside
    return jnp.matmul(vectors * values[..., None, :], vectors.mT, precision=_EXACT)


def _widened(vectors: Array, like: Array) -> Array:
    """Eigenvectors in the dtype of what they rotate, which must not have fewer bits than theirs."""
    return jnp.asarray(vectors, like.dtype)


# ---------------- damped powers


DampingMode = Literal["exact", "factored", "pi"]
Damping = ArrayLike | tuple[ArrayLike, ArrayLike]

_SMALL_ROOT = 2.0**-20  # its fourth power, times the inverse of a condition number, is in range


class ScaledPower(NamedTuple):
    """A power of eigenvalues in a form that stays in range: each is ``values * root * root``.

    Attributes:
        values: ``(stack..., in, out)``, powers of eigenvalues whose largest is near 1.
        root: ``(stack..., 1, 1)``, the same power of a power of two near the square root of the
            largest eigenvalue. Multiplying a matrix by it, before and after, is exact for integer
            powers.
    """

    values: Array
    root: Array

    @property
    def product(self) -> Array:
        """The powers themselves, which are 0 or infinite outside the range of the dtype."""
        return self.values * self.root * self.root


def check_damping(damping: Any, mode: str) -> None:
    """Refuse an unknown mode and, where its value is known, a negative or NaN damping.

    A traced damping has no known value and passes.

    Raises:
        ValueError: naming the argument and its value.
    """
    if mode not in get_args(DampingMode):
        raise ValueError(
            f"damping_mode must be one of {get_args(DampingMode)}, got {mode!r}; for one "
            "damping per factor pass damping=(damping_a, damping_g)"
        )
    dampings = damping if isinstance(damping, tuple) else (damping,)
    if isinstance(damping, tuple) and len(dampings) != 2:
        raise ValueError(f"a pair is damping=(damping_a, damping_g), got {len(dampings)} values")
    for one_damping in dampings:
        if np.shape(one_damping) != ():
            raise ValueError(
                f"damping: expected a number, or a pair (damping_a, damping_g) as a tuple, got "
                f"shape {np.shape(one_damping)}"
            )
        if not isinstance(one_damping, Tracer) and not float(one_damping) >= 0:
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

    Before they are multiplied, eigenvalues are divided by powers of two near the largest. For
    rows and gradients of size 1e-11, $\lambda_A \lambda_G$ is 1e-44, which is below the range of
    float32, and its inverse is above it. Nothing else changes, not a single bit for integer powers.

    With $\delta$ the damping and $p$ the power,

    * exact: $(\lambda_A \lambda_G + \delta)^p$
    * factored: $((\lambda_A + \sqrt\delta)(\lambda_G + \sqrt\delta))^p$
    * pi: $((\lambda_A + \pi\sqrt\delta)(\lambda_G + \sqrt\delta/\pi))^p$ with
      $\pi^2 = \overline{\lambda_A} / \overline{\lambda_G}$, the ratio of the mean
      eigenvalues, or 1 if either mean is 0
    * a pair $(\delta_A, \delta_G)$: $((\lambda_A + \delta_A)(\lambda_G + \delta_G))^p$,
      whatever the mode

    Args:
        a_values: Eigenvalues of the input factor; negative ones count as 0.
        g_values: Eigenvalues of the output factor, same dtype and stack.
        power: $p$, static. A damped eigenvalue of 0 gives 0 at every power.
        damping: $\delta \ge 0$ in units of $\lambda_A\lambda_G$, or a pair in the units of
            each factor; may be traced.
        mode: How a single damping is divided between the two factors.
        kept: False where the eigenvalue counts as 0 whatever its value and the damping, see
            :func:`jaxkfac.linalg.spectral.kronecker_above_rcond`; ``None`` keeps all.

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
        # The damping's root if that is larger: beside it the eigenvalues are lost in any case.
        root = jnp.maximum(of_product, _root(delta))
        shrink = of_product / root
        damped = a[..., :, None] * g[..., None, :] * shrink * shrink + delta / root / root
        values = power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
        return ScaledPower(values, power_or_zero(root, power))
    to_a, to_g = _per_factor(a, g, damping, mode)
    (a, of_a), (g, of_g) = _near_one(a + to_a, -1), _near_one(g + to_g, -1)
    # Powers come before the product: n_in + n_out of them instead of n_in * n_out.
    a, g = power_or_zero(a, power), power_or_zero(g, power)
    values = a[..., :, None] * g[..., None, :]
    root = power_or_zero((of_a * of_g)[..., None], power)
    return ScaledPower(values if kept is None else jnp.where(kept, values, 0), root)


def _near_one(values: Array, axes: int | tuple[int, int]) -> tuple[Array, Array]:
    """Values over the square of a power of two, so that the largest is near 1; and that power."""
    root = _root(values.max(axes, keepdims=True))
    root = jnp.where(root > 0, root, 1)
    return values / root / root, root  # two divisions: the square may be out of range


def _root(x: Array) -> Array:
    """A power of two near the square root; 0 for 0, and 1 if the root is not finite."""
    bits = jnp.finfo(x.dtype).nexp
    root = jax.lax.reduce_precision(jnp.sqrt(x), exponent_bits=bits, mantissa_bits=0)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(root), root, 1))


def block_root(
    a_values: Float[Array, "*stack n_in"], g_values: Float[Array, "*stack n_out"]
) -> Float[Array, "*stack 1 1"]:
    r"""A power of two near the root of the largest $\lambda_A \lambda_G$, as a unit for squares.

    Squares of gradients of size 1e-22 are below the range of float32; in units of the square of
    this root they are near 1. The root is 1 if the squares are in range without it.
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
    r"""The damped power of measured eigenvalues, which are not products of factors' eigenvalues.

    Each form of damping adds to them what it adds to the products $\lambda_A \lambda_G$ in their
    place: $\delta$ in the exact form, and with one damping per factor (a pair, ``"factored"`` or
    ``"pi"``) $\delta_A \lambda_G + \lambda_A \delta_G + \delta_A \delta_G$.

    Args:
        values: The eigenvalues divided by ``root ** 2``, zero or positive.
        root: The result of :func:`block_root`.
        a_values: Eigenvalues of the input factor.
        g_values: Eigenvalues of the output factor.
        power: As in :func:`kronecker_power`.
        damping: As in :func:`kronecker_power`.
        mode: As in :func:`kronecker_power`.
        kept: As in :func:`kronecker_power`.
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
    near_one, own_root = _near_one(damped if kept is None else jnp.where(kept, damped, 0), (-2, -1))
    return ScaledPower(
        power_or_zero(near_one, power),
        power_or_zero(own_root, power) * power_or_zero(common, power),
    )


def is_separable(damping: object, mode: str) -> bool:
    """Whether each factor gets its own damping, so that the damped block is a product."""
    return isinstance(damping, tuple) or mode != "exact"


def factor_damping(
    mean_a: Float[Array, "*stack"],
    mean_g: Float[Array, "*stack"],
    *,
    damping: Damping,
    mode: DampingMode,
) -> tuple[Float[Array, "*_"], Float[Array, "*_"]]:
    r"""The number that a separable damping adds to each factor, ``()`` or ``(stack...)``.

    Args:
        mean_a: The mean eigenvalue of A, which only ``"pi"`` reads.
        mean_g: The mean eigenvalue of G.
        damping: As for :func:`kronecker_power`.
        mode: ``"factored"`` or ``"pi"``; ignored for a pair.
    """
    if isinstance(damping, tuple):
        to_a, to_g = (jnp.asarray(d, mean_a.dtype) for d in damping)
        return to_a, to_g
    root = jnp.sqrt(jnp.asarray(damping, mean_a.dtype))
    return (root, root) if mode == "factored" else _pi_split(mean_a, mean_g, root)


def _per_factor(a: Array, g: Array, damping: Damping, mode: DampingMode) -> tuple[Array, Array]:
    """The numbers added to each factor's eigenvalues, ``()`` or ``(stack..., 1)``."""
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

    With one factor there is nothing to divide the damping between, so every mode is the exact one.
    From a pair the second, $\delta_G$, is added, because the block is made of output gradients.
    Where ``kept`` is False the value counts as 0.
    """
    delta = damping[1] if isinstance(damping, tuple) else damping
    damped = jnp.maximum(values, 0) + jnp.asarray(delta, values.dtype)
    return power_or_zero(damped if kept is None else jnp.where(kept, damped, 0), power)
