r"""What an adapter's nonlinearity has to say: one class for each, registered by name.

The engine does the rest: $\sigma$, stacks and banks, precision, the derivative's bookkeeping,
files. A new one is a file with a subclass, and its line in ``_registry.py``.
"""

import abc
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float


class Nonlinearity(abc.ABC):
    r"""A function $\varphi(u)$ of each element, $u = z / (|\sigma| + 10^{-6})$, with coefficients.

    A subclass writes $\varphi$ in terms of $x$ = :meth:`argument` $(u)$, the one array that is kept
    for the backward pass, and of its coefficients, which broadcast over $x$. All arrays that its
    methods get are in float32 or float64, and all they return are in that dtype. An object is
    hashable and does not change: its methods are traced once for each shape.

    Attributes:
        name: An identifier: what ``Config.nonlinearity`` says, and its word in files. Its tensors
            are ``<name>_params.weight`` and ``<name>_params.sigma``.
        initial: The first coefficients; there are as many as these. With them
            $\varphi(u) = u + O(u^2)$: a fresh adapter, with $u = 0$, must change nothing.
        formula: $\varphi$ in a line of text, for tables.
        strength_formula: :meth:`strength` likewise.
        saturated_formula: :meth:`saturated` likewise.

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
        r"""$\varphi$ as a function of $x$, of its shape.

        Args:
            x: From :meth:`argument`.
            c: The coefficients one by one, each ready to broadcast over ``x``.
        """

    @abc.abstractmethod
    def derivative(
        self, x: Float[Array, "..."], c: Sequence[Float[Array, "..."]], cotangent: Array
    ) -> tuple[Array, Sequence[Array]]:
        r"""The cotangent of $u$, and for each coefficient what sums over rows to its own.

        Args:
            x: From :meth:`argument`, all that is left of $u$.
            c: As for :meth:`apply`.
            cotangent: Of $\varphi$.

        Returns:
            ``(cotangent of u, (cotangent * dphi/dc0, ...))``, each of the shape of ``x``.
        """

    @abc.abstractmethod
    def strength(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        """Size of the coefficients that bend it beyond its first form, for a diagnosis."""

    def argument(self, u: Float[Array, "..."]) -> Float[Array, "..."]:
        """$x$; by default $u$ itself."""
        return u

    def saturated(self, x: Float[Array, "..."]) -> Bool[Array, "..."]:
        """Where next to no gradient passes to $u$; by default nowhere."""
        return jnp.zeros(x.shape, bool)

    def regulariser(self, coefficients: Float[Array, "*lead k"]) -> Float[Array, "*lead"]:
        """The penalty of each set; by default the mean square of its distance from ``initial``."""
        return jnp.square(coefficients - self.first(coefficients.dtype)).mean(-1)

    def first(self, dtype: DTypeLike) -> np.ndarray:
        """``initial`` as an array; NumPy's, so that no use of it builds a device constant."""
        return np.asarray(self.initial, dtype)

    def check(self, shape: tuple[int, ...], where: str) -> None:
        """Refuse coefficients of another number.

        Raises:
            ValueError: saying where they are.
        """
        if shape[-1] != len(self.initial):
            raise ValueError(
                f"{where}: nonlinearity {self.name!r} has {len(self.initial)} coefficients, got "
                f"{shape[-1]}; say the nonlinearity, or the config, that it was made with"
            )

    @property
    def tensors(self) -> dict[str, str]:
        """How the keys of its leaves end in files."""
        return {part: f"{self.name}_params.{key}" for part, key in _TENSORS.items()}

    @property
    def settings(self) -> tuple[str, str, str]:
        """Its placement, first sigma and weight of the regulariser in ``adapter_config.json``."""
        return f"{self.name}_placement", "init_sigma", f"{self.name}_reg_weight"


_TENSORS = {"coefficients": "weight", "sigma": "sigma"}
