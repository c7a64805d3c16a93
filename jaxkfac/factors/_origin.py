"""Of which Fisher type and likelihoods factors are."""

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose gradients factors are made of. It is static, and holds no arrays.

    Collectors note it, and eigenbases carry it on. Where nothing is known (factors that were built
    by hand, or read from a file of before it was kept) it is ``None``.

    Attributes:
        fisher: The Fisher type, as ``fisher=`` calls it.
        likelihoods: Names of the likelihoods' classes, each once, in order of the alphabet. None
            of a scalar loss that marks no outputs: its likelihood is not known.
        examples: ``"apart"`` where the user has said so of examples that are not known to be.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (jnp.eye(3), jnp.zeros((3, 2)))
        >>> factors = jk.value_grad_and_factors(objective, fisher="exact")(params, batch).factors
        >>> print(factors.origin, jk.eigendecompose(factors).origin == factors.origin)
        fisher='exact' of Gaussian True
    """

    fisher: str
    likelihoods: tuple[str, ...] = ()
    examples: str | None = None

    @classmethod
    def of(cls, fisher: str, likelihoods: Iterable[Any], examples: str | None = None) -> "Origin":
        """The origin of likelihoods, of which only the classes count."""
        return cls(fisher, tuple(sorted({type(x).__name__ for x in likelihoods})), examples)

    def __str__(self) -> str:
        named = f" of {' and '.join(self.likelihoods)}" if self.likelihoods else ""
        word = "" if self.examples is None else f", examples={self.examples!r}"
        return f"fisher={self.fisher!r}{named}{word}"

    def has_other_likelihoods(self, other: "Origin") -> bool:
        """Whether both are known to be of likelihoods, and of unlike ones."""
        known = self.likelihoods and other.likelihoods
        return bool(known) and self.likelihoods != other.likelihoods


def check_same_origin(what: str, one: Origin | None, other: Origin | None) -> None:
    """Refuse a sum of what is known to be of unlike Fisher types or likelihoods.

    Args:
        what: What is added.
        one: Of the first.
        other: Of the second.

    Raises:
        ValueError: naming both.
    """
    if one is None or other is None:
        return
    if one.fisher != other.fisher or one.has_other_likelihoods(other):
        raise ValueError(
            f"{what} of {other} are added to those of {one}, and the sum would be of neither: "
            "collect both alike; or, if it is meant, say that it is not known of what one of them "
            "is, with dataclasses.replace(..., origin=None)"
        )
