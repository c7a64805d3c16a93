"""How K-FAC keeps what it preconditions with: eigenvectors, or inverses of damped factors."""

import abc
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkfac._checks import one_of
from jaxkfac.curvature import (
    Eigenbases,
    Inverses,
    check_separable,
    eigendecompose,
    identity_bases,
    identity_inverses,
    invert,
    natural_gradient,
    precondition,
)
from jaxkfac.factors import Factors
from jaxkfac.linalg import Damping, DampingMode, Spectrum, is_separable
from jaxkfac.optim._injected import Clipping

PyTree = Any
InverseMethod = Literal["auto", "eigh", "cholesky", "host"]


class Preconditioner(abc.ABC):
    """Made of a factor average at a refresh, kept in the state, applied at every step.

    Args:
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``.
    """

    kept: type
    on_host = False

    def __init__(self, damping_mode: DampingMode) -> None:
        self._mode = damping_mode

    @abc.abstractmethod
    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Any:
        """Of factors that are the identity."""

    @abc.abstractmethod
    def fresh(self, average: Factors, damping: Damping, clipping: Clipping) -> Any:
        """Of an average."""

    @abc.abstractmethod
    def apply(self, grads: PyTree, held: Any, damping: Damping) -> PyTree:
        """Preconditioned gradients; those that no layer covers as they are."""


class _Eigenvectors(Preconditioner):
    """Four products a layer, at the damping of the step."""

    kept = Eigenbases

    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Eigenbases:
        return identity_bases(like, **clipping)

    def fresh(self, average: Factors, damping: Damping, clipping: Clipping) -> Eigenbases:
        placement = "host" if self.on_host else "device"
        return eigendecompose(average, placement=placement, **clipping)

    def apply(self, grads: PyTree, held: Eigenbases, damping: Damping) -> PyTree:
        options: Any = {"damping_mode": self._mode, "missing": "identity"}
        return natural_gradient(grads, held, damping=damping, **options)


class _HostEigenvectors(_Eigenvectors):
    """The same, decomposed by the host in float64, and so outside of ``jit``."""

    on_host = True


class _CholeskyInverses(Preconditioner):
    """Two products a layer, at the damping of the refresh."""

    kept = Inverses

    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Inverses:
        return identity_inverses(like, damping=damping, damping_mode=self._mode, **clipping)

    def fresh(self, average: Factors, damping: Damping, clipping: Clipping) -> Inverses:
        return invert(average, damping=damping, damping_mode=self._mode, **clipping)

    def apply(self, grads: PyTree, held: Inverses, damping: Damping) -> PyTree:
        return precondition(grads, held)


METHODS: dict[str, type[Preconditioner]] = {
    "eigh": _Eigenvectors,
    "cholesky": _CholeskyInverses,
    "host": _HostEigenvectors,
}


def preconditioner_of(
    inverse: InverseMethod, damping: Any, damping_mode: DampingMode
) -> Preconditioner:
    """The one that ``inverse=`` names.

    Raises:
        ValueError: an unknown name, or inverses of a damping that is not separable.
    """
    one_of("inverse", inverse, ("auto", *METHODS))
    if inverse == "auto":
        inverse = "cholesky" if is_separable(damping, damping_mode) else "eigh"
    if inverse == "cholesky":
        check_separable(damping, damping_mode)
    return METHODS[inverse](damping_mode)


def keep_where_not_finite(new: Any, old: Any) -> tuple[Any, Int[Array, ""]]:
    """``new``, with each factor that failed to decompose taken from ``old``, and their number.

    A solver that does not converge on an accelerator returns NaN and raises nothing.
    """
    failed = []

    def pick(fresh: Any, stale: Any) -> Any:
        if isinstance(fresh, Spectrum):
            ok = _counted(jnp.isfinite(fresh.values).all(-1), failed)
            values = jnp.where(ok[..., None], fresh.values, stale.values)
            if fresh.vectors is None:
                return Spectrum(values, None)
            return Spectrum(values, jnp.where(ok[..., None, None], fresh.vectors, stale.vectors))
        if isinstance(new, Inverses) and fresh.ndim >= 2:
            ok = _counted(jnp.isfinite(fresh).all((-2, -1), keepdims=True), failed)
        else:  # the diagonal of a scale or lone bias
            ok = _counted(jnp.isfinite(fresh).all(), failed)
        return jnp.where(ok, fresh, stale)

    picked = jax.tree.map(pick, new, old, is_leaf=lambda x: isinstance(x, Spectrum))
    return picked, sum(failed, jnp.zeros((), jnp.int32))


def _counted(ok: Bool[Array, "..."], failed: list[Array]) -> Bool[Array, "..."]:
    failed.append((~ok).sum(dtype=jnp.int32))
    return ok
