r"""A kernel that is read in both orientations: one Kronecker product for the sum of two.

A network that is differentiated by its inputs in reverse reads a kernel forward and backward. The
forward readings give $A_1 \otimes G_1$. The backward ones read rows of output features, and their
gradients are rows of input features: theirs is $G_2 \otimes A_2$ in the order of the first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxkfac.interception import Layer

AnyArray = Any  # of JAX or of NumPy


def turned_pairs(layers: Sequence[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """The layers whose kernel another layer reads in the other orientation, and that one.

    The first has the parameter's name. An A that other layers read too has to stay what it is for
    them, and so is left alone.
    """
    by_path: dict[Any, list[Layer]] = {}
    for layer in layers:
        by_path.setdefault((layer.weight.path, layer.weight.index), []).append(layer)
    readers: dict[str, int] = {}
    for layer in layers:
        readers[layer.input] = readers.get(layer.input, 0) + 1
    for group in by_path.values():
        first, *others = sorted(group, key=lambda layer: "@" in layer.suffix)
        for other in others:
            alone = readers[first.input] == readers[other.input] == 1
            if alone and first.kind == other.kind and other.weight.is_transpose_of(first.weight):
                yield first, other


class Side(NamedTuple):
    """One factor of a block: ``(stack..., n, n)``, or ``(stack..., n)`` for a diagonal."""

    x: AnyArray
    dense: bool

    @property
    def _axes(self) -> tuple[int, ...]:
        return (-2, -1) if self.dense else (-1,)

    def inner(self, other: "Side") -> AnyArray:
        """Inner products, ``(stack...)``."""
        return (self.x * other.x).sum(self._axes)

    def times(self, factor: AnyArray) -> "Side":
        """The side times one number for each entry of the stack."""
        return Side(self.x * factor.reshape(*factor.shape, *[1] * len(self._axes)), self.dense)

    def plus(self, other: "Side") -> "Side":
        return Side(self.x + other.x, self.dense)

    def diagonal(self) -> "Side":
        return Side(self.x.diagonal(0, -2, -1), False) if self.dense else self

    def without_last(self) -> "Side":
        """Without the last row and column: the ones of a bias."""
        return Side(self.x[..., :-1, :-1] if self.dense else self.x[..., :-1], self.dense)

    def padded(self, size: int) -> "Side":
        """With zeros up to a size."""
        missing, own = size - self.x.shape[-1], len(self._axes)
        if not missing:
            return self
        xp: Any = np if isinstance(self.x, np.ndarray) else jnp
        widths = [(0, 0)] * (self.x.ndim - own) + [(0, missing)] * own
        return Side(xp.pad(self.x, widths), self.dense)


def nearest_product(one: tuple[Side, Side], other: tuple[Side, Side]) -> tuple[Side, Side]:
    r"""The Kronecker product nearest to $A_1 \otimes G_1 + A_2 \otimes G_2$.

    In the Frobenius norm it is the leading singular pair of the sum of two outer products of
    vectors: a combination of $A_1$ and $A_2$, and one of $G_1$ and $G_2$, whose coefficients are an
    eigenvector of a matrix of two rows. They are not negative, so both factors stay positive
    semi-definite. Where one of the products is zero, or both G are multiples of one, it is exact.

    Args:
        one: $A_1$ and $G_1$.
        other: $A_2$ and $G_2$; sides that are smaller than those of ``one`` (they lack the ones
            of a bias) are padded with zeros.

    Returns:
        The two factors; the first has the norm of $A_1$, where that is not zero.

    References:
        Van Loan and Pitsianis, Approximation with Kronecker products, 1993.
    """
    (a1, a2), (g1, g2) = (_alike(x, y) for x, y in zip(one, other, strict=True))
    xp: Any = np if isinstance(a1.x, np.ndarray) and isinstance(g1.x, np.ndarray) else jnp

    def over(x: AnyArray, y: AnyArray) -> AnyArray:
        return x / xp.where(y == 0, xp.ones_like(y), y)

    norms = [xp.sqrt(x.inner(x)) for x in (a1, a2, g1, g2)]
    rho = over(over(a1.inner(a2), norms[0]), norms[1])
    tau = over(over(g1.inner(g2), norms[2]), norms[3])
    w1, w2 = norms[0] * norms[2], norms[1] * norms[3]
    whole = xp.maximum(w1, w2)
    w1, w2 = over(w1, whole), over(w2, whole)
    # Of sides of norm one the coefficients in A are the leading eigenvector of this matrix.
    cross = w1 * w2 * tau
    m11, m12 = w1**2 + cross * rho, w1**2 * rho + cross
    m21, m22 = cross + w2**2 * rho, cross * rho + w2**2
    half = (m11 - m22) / 2
    root = xp.sqrt(half**2 + m12 * m21)
    u1, u2 = xp.where(half >= 0, root + half, m12), xp.where(half >= 0, m21, root - half)
    none = (u1 == 0) & (u2 == 0)  # both are as near
    u1, u2 = xp.where(none, xp.ones_like(u1), u1), xp.where(none, xp.ones_like(u2), u2)
    v1, v2 = w1 * (u1 + rho * u2), w2 * (rho * u1 + u2)
    length = xp.sqrt(u1**2 + u2**2 + 2 * rho * u1 * u2)
    scale = xp.where(norms[0] > 0, norms[0], xp.ones_like(norms[0]))

    def combined(x: Side, y: Side, times: AnyArray, of: Sequence[AnyArray]) -> Side:
        return x.times(over(of[0], of[2]) * times).plus(y.times(over(of[1], of[3]) * times))

    left = combined(a1, a2, scale / length, (u1, u2, norms[0], norms[1]))
    right = combined(g1, g2, whole / (length * scale), (v1, v2, norms[2], norms[3]))
    return left, right


def _alike(x: Side, y: Side) -> tuple[Side, Side]:
    if x.dense != y.dense:
        x, y = x.diagonal(), y.diagonal()
    return x, y.padded(x.x.shape[-1])
