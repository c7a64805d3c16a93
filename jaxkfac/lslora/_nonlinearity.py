"""Nonlinearities of an adapter's hidden values, registered by name; the Fourier nonlinearity."""

import abc
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxkfac.linalg import statistics_dtype

# ---------------- the interface of a nonlinearity
#
# The engine handles the rest: $\sigma$, stacks and banks, precision, the custom derivative, files.
# A new nonlinearity is a subclass with an instance passed to :func:`register`.


class Nonlinearity(abc.ABC):
    r"""A function $\varphi(u)$ of each element, $u = z / (|\sigma| + 10^{-6})$, with coefficients.

    A subclass defines $\varphi$ in terms of $x$ = :meth:`argument` $(u)$, the only array kept for
    the backward pass, and of its coefficients, which broadcast over $x$. Its methods receive arrays
    in float32 or float64 and return arrays of the same dtype. An instance must be hashable and
    immutable: its methods are traced once for each shape.

    Attributes:
        name: An identifier, used in ``Config.nonlinearity`` and in files. Its tensors are
            ``<name>_params.weight`` and ``<name>_params.sigma``.
        initial: The initial coefficients, which also define their number. They must give
            $\varphi(u) = u + O(u^2)$, because a new adapter, with $u = 0$, must change nothing.
        formula: $\varphi$ as a line of text, for tables.
        strength_formula: :meth:`strength` as a line of text.
        saturated_formula: :meth:`saturated` as a line of text.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> class Cubic(lslora.Nonlinearity):
        ...     name, initial = "cubic", (1.0, 0.0)
        ...     formula, strength_formula = "φ = c0 u + c1 u³ with u = z / σ", "|c1|"
        ...     def apply(self, x, c):
        ...         return c[0] * x + c[1] * x**3
        ...     def derivative(self, x, c, cotangent):
        ...         slope = c[0] + 3 * c[1] * x**2
        ...         return cotangent * slope, (cotangent * x, cotangent * x**3)
        ...     def strength(self, coefficients):
        ...         return jnp.abs(coefficients[..., 1])
        >>> Cubic().regulariser(jnp.array([[1.0, 0.0], [1.0, 2.0]])).tolist()
        [0.0, 2.0]
    """

    name: str
    initial: tuple[float, ...]
    formula: str
    strength_formula: str
    saturated_formula: str = "nowhere"

    @abc.abstractmethod
    def apply(self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]]) -> Array:
        r"""$\varphi$ as a function of $x$, with the shape of $x$.

        Args:
            x: From :meth:`argument`.
            c: The coefficients one by one, each ready to broadcast over ``x``.
        """

    @abc.abstractmethod
    def derivative(
        self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]], cotangent: Array
    ) -> tuple[Array, Sequence[Array]]:
        r"""The cotangent of $u$, and for each coefficient an array whose sum over rows is its own.

        Args:
            x: From :meth:`argument`; $u$ itself is not kept.
            c: As for :meth:`apply`.
            cotangent: Cotangent of $\varphi$.

        Returns:
            ``(cotangent of u, (cotangent * dphi/dc0, ...))``, each with the shape of ``x``.
        """

    @abc.abstractmethod
    def strength(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        r"""Size of the coefficients that bend $\varphi$ beyond its initial form, for diagnosis."""

    def argument(self, u: Float[Array, "..."]) -> Float[Array, "..."]:
        """$x$; by default $u$ itself."""
        return u

    def saturated(self, x: Float[Array, "..."]) -> Bool[Array, "..."]:
        """Where almost no gradient passes to $u$; by default nowhere."""
        return jnp.zeros(x.shape, bool)

    def regulariser(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        """The penalty of each set; by default its mean squared distance from ``initial``."""
        return jnp.square(coefficients - self.first(coefficients.dtype)).mean(-1)

    def first(self, dtype: DTypeLike) -> np.ndarray:
        """``initial`` as a NumPy array, so that using it builds no device constant."""
        return np.asarray(self.initial, dtype)

    def check(self, shape: tuple[int, ...], where: str) -> None:
        """Refuse coefficients of the wrong number.

        Raises:
            ValueError: says where they are.
        """
        if shape[-1] != len(self.initial):
            raise ValueError(
                f"{where}: nonlinearity {self.name!r} has {len(self.initial)} coefficients, got "
                f"{shape[-1]}; say the nonlinearity, or the config, that it was made with"
            )

    @property
    def tensors(self) -> dict[str, str]:
        """The ends of the keys of its leaves in files."""
        return {leaf_name: f"{self.name}_params.{key}" for leaf_name, key in _TENSORS.items()}

    @property
    def settings(self) -> tuple[str, str, str]:
        """Names of its placement, initial sigma and weight in ``adapter_config.json``."""
        return f"{self.name}_placement", "init_sigma", f"{self.name}_reg_weight"


_TENSORS = {"coefficients": "weight", "sigma": "sigma"}


# ---------------- applying a nonlinearity, with a derivative that keeps one array
#
# Written with library functions, $\varphi$ would keep all its intermediate values for the backward
# pass: tanh, sine and cosine. Here the backward pass starts from $x$ alone, and $\sigma$ stays
# outside: where $z$ is a product, as in an adapter, $1 / (|\sigma| + \epsilon)$ multiplies the
# smaller operand, so neither $\sigma$ nor its gradient costs a pass over $z$.


EPSILON = 1e-6  # keeps z / (|sigma| + EPSILON) finite


def activation(
    phi: Nonlinearity,
    u: Float[Array, "..."],
    coefficients: Float[Array, "*lead k"],
    sigma: Float[Array, "*lead"] | None = None,
    *,
    forward_mode: bool = False,
) -> Float[Array, "..."]:
    r"""$\varphi$ of $u = z / (|\sigma| + 10^{-6})$, in float32 or wider.

    Args:
        phi: The nonlinearity.
        u: Any float dtype; its leading axes are those of the coefficients.
        coefficients: One set for each entry of the leading axes.
        sigma: Pass it only if an infinite one means the identity.
        forward_mode: Leave the derivative to JAX, for ``jvp``; this keeps more arrays.

    Memory:
        The backward pass keeps one array of the size and dtype of ``u``.
    """
    out = (_primal if forward_mode else _activation)(phi, u, coefficients)
    if sigma is None:
        return out
    return jnp.where(jnp.isinf(_over(sigma, out)), u.astype(out.dtype), out)


def width(
    sigma: Float[Array, "*lead"], z: Float[Array, "..."], may_be_linear: bool = False
) -> Float[Array, "..."]:
    r"""$|\sigma| + 10^{-6}$, or 1 for an infinite $\sigma$ that means the identity.

    It is in float32 or wider, ready to broadcast over ``z``.
    """
    sigma = _over(sigma, z)
    finite_width = jnp.abs(sigma) + EPSILON
    return jnp.where(jnp.isinf(sigma), 1, finite_width) if may_be_linear else finite_width


def over_width(
    sigma: Float[Array, "*lead"], z: Float[Array, "..."], may_be_linear: bool = False
) -> Float[Array, "..."]:
    r"""$u = z / (|\sigma| + 10^{-6})$, in float32 or wider."""
    return z.astype(statistics_dtype(z.dtype)) / width(sigma, z, may_be_linear)


def _argument(phi: Nonlinearity, u: Array) -> Array:
    return phi.argument(u.astype(statistics_dtype(u.dtype)))


def _over(x: Array, z: Array) -> Array:
    """Expand ``x``, one value per entry of the leading axes of ``z``, to broadcast over ``z``."""
    wide = statistics_dtype(z.dtype)
    return x.astype(wide).reshape(*x.shape, *[1] * (z.ndim - x.ndim))


def _broadcast_coefficients(coefficients: Array, x: Array) -> list[Array]:
    return [_over(coefficients[..., k], x) for k in range(coefficients.shape[-1])]


# Traced once for all adapters of one shape.
@functools.partial(jax.jit, static_argnums=0)
def _value(phi: Nonlinearity, x: Array, coefficients: Array) -> Array:
    return phi.apply(x, _broadcast_coefficients(coefficients, x))


@functools.partial(jax.jit, static_argnums=0)
def _derivative(
    phi: Nonlinearity, x: Array, coefficients: Array, cotangent: Array
) -> tuple[Array, Array]:
    du, products = phi.derivative(x, _broadcast_coefficients(coefficients, x), cotangent)
    rows = tuple(range(coefficients.ndim - 1, x.ndim))
    return du, jnp.stack([product.sum(rows) for product in products], -1)


def _primal(phi: Nonlinearity, u: Array, coefficients: Array) -> Array:
    return _value(phi, _argument(phi, u), coefficients)


def _forward(phi: Nonlinearity, u: Array, coefficients: Array) -> tuple[Array, tuple[Array, Array]]:
    x = _argument(phi, u)
    residual = x if x.dtype == u.dtype else u  # half the bytes; x is then recomputed once
    return _value(phi, x, coefficients), (residual, coefficients)


def _backward(
    phi: Nonlinearity, saved: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    residual, coefficients = saved
    # Without the barrier, values that apply computed, such as sine and cosine, are common
    # subexpressions, which a program without a scan keeps.
    residual = jax.lax.optimization_barrier(residual)
    x = residual if residual.dtype == cotangent.dtype else _argument(phi, residual)
    du, sums = _derivative(phi, x, coefficients, cotangent)
    return du.astype(residual.dtype), sums.astype(coefficients.dtype)


_activation = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_activation.defvjp(_forward, _backward)


# ---------------- the Fourier nonlinearity, after which the adapter is named


SATURATED = 0.95  # above this |x| the slope of tanh, 1 - x^2, is below a tenth

# sin(pi x / 2) = x R(x^2) and cos(pi x / 2) = (1 - x^2) T(x^2) on [-1, 1], constant term first:
# Chebyshev interpolants of degree 4 in x^2, which leave 6.6e-9 and 0.9e-9 before rounding.
_R = (1.5707963200386006, -0.6459637595835207, 0.07968991832894333)
_R += (-0.004674143838021253, 0.00015167170360622396)
_T = (0.9999999991226082, -0.2337005062545816, 0.019968606206726632)
_T += (-0.0008935355013407152, 2.360068951361764e-05)


class Fourier(Nonlinearity):
    r"""$\varphi = c_0 + c_1 \hat x + c_2 \sin \pi\hat x + c_3 \cos \pi\hat x$, $\hat x = \tanh u$.

    $\hat x$ also gives the slope of tanh, so the backward pass needs nothing else.
    """

    name = "fourier"
    initial = (0.0, 1.0, 0.0, 0.0)
    formula = "φ = c0 + c1 x + c2 sin πx + c3 cos πx with x = tanh(z / σ)"
    strength_formula = "|c2| + |c3|, and 0 still leaves a tanh"
    saturated_formula = f"|x| > {SATURATED}, where tanh has lost nine tenths of its slope"

    def argument(self, u: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.tanh(u)

    def apply(self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]]) -> Array:
        sine, cosine = sin_cos_pi(x)
        return c[0] + c[1] * x + c[2] * sine + c[3] * cosine

    def derivative(
        self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]], cotangent: Array
    ) -> tuple[Array, Sequence[Array]]:
        sine, cosine = sin_cos_pi(x)
        # Without these products XLA may keep the forward pass's sine and cosine.
        by_sine, by_cosine = cotangent * sine, cotangent * cosine
        du = (c[1] * cotangent + math.pi * (c[2] * by_cosine - c[3] * by_sine)) * (1 - x * x)
        return du, (cotangent, cotangent * x, by_sine, by_cosine)

    def strength(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        return jnp.abs(coefficients[..., 2]) + jnp.abs(coefficients[..., 3])

    def saturated(self, x: Float[Array, "..."]) -> Bool[Array, "..."]:
        return jnp.abs(x) > SATURATED


FOURIER = Fourier()


def fourier(
    z: Float[Array, "..."],
    coefficients: Float[Array, "*lead 4"],
    sigma: Float[Array, "*lead"],
    *,
    may_be_linear: bool = False,
    forward_mode: bool = False,
) -> Float[Array, "..."]:
    r"""$\varphi(z) = c_0 + c_1 \hat x + c_2 \sin \pi\hat x + c_3 \cos \pi\hat x$.

    $\hat x = \tanh(z / (|\sigma| + 10^{-6}))$. It is computed in float32 or wider: bfloat16 has
    errors up to 0.012.

    Args:
        z: Any float dtype; its leading axes are those of ``sigma``.
        coefficients: One set for each entry of the leading axes.
        sigma: One value for each entry of the leading axes.
        may_be_linear: Whether an infinite $\sigma$ means the identity.
        forward_mode: Leave the derivative to JAX, for ``jvp``; this keeps more arrays.

    Returns:
        $\varphi(z)$ in float32, or in the dtype of ``z`` if that is wider.

    Memory:
        The backward pass keeps ``z``, for the gradient of ``sigma``, and $\hat x$, both in the
        dtype of the result. An adapter keeps only one of the two.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkfac.lslora import fourier
        >>> z, coefficients = jnp.array([0.0, 1.0]), jnp.array([0.5, 1, 0, 0])
        >>> [f"{value:.3f}" for value in fourier(z, coefficients, jnp.array(1.0))]
        ['0.500', '1.262']
    """
    u = over_width(sigma, z, may_be_linear)
    infinite = sigma if may_be_linear else None
    return activation(FOURIER, u, coefficients, infinite, forward_mode=forward_mode)


def sin_cos_pi(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""$\sin \pi x$ and $\cos \pi x$ for $|x| \le 1$.

    In float32 it uses polynomials of the half angle, with an error below 1e-6. Other dtypes use
    the library's functions.
    """
    if x.dtype != jnp.float32:
        return jnp.sin(math.pi * x), jnp.cos(math.pi * x)
    u = x * x
    s, c = x * _horner(_R, u), (1 - u) * _horner(_T, u)
    return 2 * s * c, (c - s) * (c + s)  # the form 1 - 2 s^2 has twice the error


def _horner(coefficients: tuple[float, ...], u: Array) -> Array:
    total = jnp.full_like(u, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * u + c
    return total


# ---------------- nonlinearities by name


# This table grows at run time: a file names its nonlinearity, and its reader must find an object
# that the caller may have defined.
_KNOWN: dict[str, Nonlinearity] = {}


def register(nonlinearity: Nonlinearity) -> None:
    """Register a nonlinearity by its name, for :class:`Config` and for files.

    Args:
        nonlinearity: One hashable, immutable object for the life of the process: its methods are
            traced once for each shape.

    Raises:
        TypeError: it is not hashable, such as a dataclass that is not frozen or holds an array.
        ValueError: its name is no identifier or belongs to another object, or it has no
            coefficients.
    """
    name = nonlinearity.name
    if not name.isidentifier():
        raise ValueError(f"nonlinearity {name!r}: expected an identifier, which keys in files hold")
    if not nonlinearity.initial:
        raise ValueError(f"nonlinearity {name!r} has no initial coefficients")
    try:
        hash(nonlinearity)
    except TypeError:
        raise TypeError(
            f"nonlinearity {name!r} has no hash: a dataclass has one if it is frozen, and if all "
            "its fields have one"
        ) from None
    if _KNOWN.get(name, nonlinearity) is not nonlinearity:
        raise ValueError(f"nonlinearity {name!r} is registered already, as {_KNOWN[name]!r}")
    _KNOWN[name] = nonlinearity


def find_nonlinearity(name: str) -> Nonlinearity:
    """The nonlinearity with a name.

    Raises:
        ValueError: the name is unknown; lists the known names.
    """
    if name not in _KNOWN:
        raise ValueError(
            f"nonlinearity={name!r}: expected one of {', '.join(map(repr, sorted(_KNOWN)))}, or "
            "one that was registered with jk.lslora.register"
        )
    return _KNOWN[name]


for _member in (FOURIER,):
    register(_member)
