"""What K-FAC preconditions with: eigenvectors, or inverses of damped factors."""

import abc
import dataclasses
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac._errors import one_of
from jaxkfac.blocks import Corrections, Factors, Side, over_stack
from jaxkfac.curvature import (
    Eigenbases,
    Inverses,
    MeshAxis,
    Placement,
    check_separable,
    eigendecompose,
    identity_bases,
    identity_inverses,
    invert,
    natural_gradient,
    precondition,
    refresh_bases,
    refresh_inverses,
)
from jaxkfac.linalg.spectral import Damping, DampingMode, Spectrum, is_separable
from jaxkfac.optim._schedules import Clipping

InverseMethod = Literal["auto", "eigh", "qr", "cholesky", "host"]
Bases = TypeVar("Bases", Eigenbases, Inverses)


class Preconditioner(abc.ABC, Generic[Bases]):
    """Computed from a factor average at a refresh, stored in the state, applied at every step.

    Args:
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``.
    """

    stored_type: type
    on_host = False
    damps_at_refresh = False

    def __init__(self, damping_mode: DampingMode) -> None:
        self._mode = damping_mode

    @abc.abstractmethod
    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Bases:
        """Bases or inverses of identity factors."""

    @abc.abstractmethod
    def fresh(
        self, average: Factors, damping: Damping, clipping: Clipping, axis: MeshAxis | None
    ) -> Bases:
        """Compute bases or inverses from an average, on the devices of a mesh axis, if given."""

    def renewed(
        self,
        current: Bases,
        first: Bool[Array, ""],
        average: Factors,
        damping: Damping,
        clipping: Clipping,
        axis: MeshAxis | None,
    ) -> tuple[Bases, Int[Array, ""]]:
        """What replaces ``current`` for the layers of an average, and how many sides failed.

        ``first`` says that ``current`` has seen no factors yet. With an axis, devices share the
        matrices; otherwise each is solved in place.
        """
        if axis is None:
            return self.in_place(current, first, average, damping)
        new = self.fresh(average, damping, clipping, axis)
        return keep_where_not_finite(new, of_layers_in(new, current))

    @abc.abstractmethod
    def in_place(
        self, current: Bases, first: Bool[Array, ""], average: Factors, damping: Damping
    ) -> tuple[Bases, Int[Array, ""]]:
        """Refresh ``current`` in place, one matrix after the other."""

    def with_corrections(self, current: Bases, like: Corrections | None) -> Bases:
        """Add empty measured eigenvalues, if ``like`` has their shapes."""
        return current

    def check_stagger(self, *, stagger: bool, measures: bool) -> None:
        """Refuse a staggered refresh where only a complete one works.

        Raises:
            ValueError: names the remedy.
        """
        if stagger and self.on_host:
            raise ValueError("stagger=True is for a refresh in graph, not for inverse='host'")
        if stagger and measures:
            raise ValueError(
                "stagger=True renews eigenvectors part by part, and measured eigenvalues "
                "(bases=) have one count for all: leave out one of the two"
            )

    def check_measured(self, factors: Factors) -> None:
        """Refuse measured eigenvalues if they cannot be used.

        Raises:
            ValueError: names the remedy.
        """
        if factors.corrections is not None:
            raise ValueError(
                "the factors hold eigenvalues measured in eigenbases (bases=), and this kfac keeps "
                "inverses: build it with inverse='eigh'"
            )

    def advanced(
        self, current: Bases, factors: Factors | None, decay: ArrayLike | None
    ) -> tuple[Bases, Corrections | None]:
        """Split off the measured eigenvalues, and add a step's to them.

        Without a ``decay`` they stay unchanged.
        """
        return current, None

    def measured_since(
        self, current: Bases, corrections: Corrections | None, renewed: Bool[Array, ""]
    ) -> Bases:
        """Put measured eigenvalues back; they restart from zero if the eigenvectors are new."""
        return current

    @abc.abstractmethod
    def apply(self, grads: ArrayTree, current: Bases, damping: Damping) -> ArrayTree:
        """Precondition gradients; leaves that no layer covers stay unchanged."""


class _Eigenvectors(Preconditioner[Eigenbases]):
    """Eigenvectors: four products for each layer, with the damping of the step."""

    stored_type = Eigenbases

    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Eigenbases:
        return identity_bases(like, **clipping)

    def fresh(
        self, average: Factors, damping: Damping, clipping: Clipping, axis: MeshAxis | None
    ) -> Eigenbases:
        placement: Placement = "host" if self.on_host else "device"
        return eigendecompose(average, placement=placement, distribute=axis, **clipping)

    def in_place(
        self, current: Eigenbases, first: Bool[Array, ""], average: Factors, damping: Damping
    ) -> tuple[Eigenbases, Int[Array, ""]]:
        return refresh_bases(current, average)

    def apply(self, grads: ArrayTree, bases: Eigenbases, damping: Damping) -> ArrayTree:
        options: Any = {"damping_mode": self._mode, "missing": "identity"}
        return natural_gradient(grads, bases, damping=damping, **options)

    def with_corrections(self, current: Eigenbases, like: Corrections | None) -> Eigenbases:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return dataclasses.replace(current, corrections=zeros)

    def check_measured(self, factors: Factors) -> None:
        return

    def advanced(
        self, current: Eigenbases, factors: Factors | None, decay: ArrayLike | None
    ) -> tuple[Eigenbases, Corrections | None]:
        old, new = current.corrections, None if factors is None else factors.corrections
        current = dataclasses.replace(current, corrections=None)
        if new is None:
            return current, old
        if old is None:
            old = jax.tree.map(jnp.zeros_like, new)
        if decay is None:
            return current, old
        return current, old.decayed(decay, new)

    def measured_since(
        self, current: Eigenbases, corrections: Corrections | None, renewed: Bool[Array, ""]
    ) -> Eigenbases:
        if corrections is not None:
            zeros = jax.tree.map(jnp.zeros_like, corrections)
            corrections = jax.lax.cond(renewed, lambda: zeros, lambda: corrections)
        return dataclasses.replace(current, corrections=corrections)


class _HostEigenvectors(_Eigenvectors):
    """Eigenvectors computed by the host in float64, and therefore outside ``jit``."""

    on_host = True


class _IteratedEigenvectors(_Eigenvectors):
    """Eigenvectors updated at each refresh after the first by a step of orthogonal iteration."""

    def renewed(
        self,
        current: Eigenbases,
        first: Bool[Array, ""],
        average: Factors,
        damping: Damping,
        clipping: Clipping,
        axis: MeshAxis | None,
    ) -> tuple[Eigenbases, Int[Array, ""]]:
        if axis is not None:
            raise ValueError(
                'distribute= divides eigendecompositions among devices, and "qr" makes them at the '
                'first refresh alone: leave it out, or take inverse="eigh"'
            )
        return refresh_bases(current, average, iterate=~first)


class _CholeskyInverses(Preconditioner[Inverses]):
    """Inverses: two products for each layer, with the damping of the refresh."""

    stored_type = Inverses
    damps_at_refresh = True

    def initial(self, like: Factors, damping: Damping, clipping: Clipping) -> Inverses:
        how: Any = {"damping": damping, "damping_mode": self._mode}
        return identity_inverses(like, **how, **clipping).packed_like(like)

    def fresh(
        self, average: Factors, damping: Damping, clipping: Clipping, axis: MeshAxis | None
    ) -> Inverses:
        how: Any = {"damping": damping, "damping_mode": self._mode, "distribute": axis}
        return invert(average, **how, **clipping).packed_like(average)

    def in_place(
        self, current: Inverses, first: Bool[Array, ""], average: Factors, damping: Damping
    ) -> tuple[Inverses, Int[Array, ""]]:
        how: Any = {"damping": damping, "damping_mode": self._mode}
        return refresh_inverses(current, average, **how)

    def apply(self, grads: ArrayTree, inverses: Inverses, damping: Damping) -> ArrayTree:
        return precondition(grads, inverses)


METHODS: dict[str, type[Preconditioner]] = {
    "eigh": _Eigenvectors,
    "qr": _IteratedEigenvectors,
    "cholesky": _CholeskyInverses,
    "host": _HostEigenvectors,
}


def preconditioner_of(
    inverse: InverseMethod, damping: object, damping_mode: DampingMode, *, measures: bool
) -> Preconditioner:
    """The preconditioner that ``inverse=`` names.

    Args:
        inverse: Its name.
        damping: Only whether it is a pair is read.
        damping_mode: As in :func:`jaxkfac.kfac`.
        measures: Whether eigenvalues are measured, which needs eigenvectors.

    Raises:
        ValueError: an unknown name, or inverses where they cannot be used.
    """
    one_of("inverse", inverse, ("auto", *METHODS))
    if inverse == "auto":
        separable = is_separable(damping, damping_mode)
        inverse = "cholesky" if separable and not measures else "eigh"
    if inverse == "cholesky":
        check_separable(damping, damping_mode)
        if measures:
            raise ValueError(
                "like= has eigenvalues measured in eigenbases (bases=), and inverse='cholesky' "
                "keeps none: take inverse='eigh'"
            )
    return METHODS[inverse](damping_mode)


def of_layers_in(group: Bases, bases: Bases) -> Bases:
    """Select the layers of ``group`` from ``bases``."""
    return group.with_sides({place: bases.side(place) for place in group.sides})


def keep_where_not_finite(new: Bases, old: Bases) -> tuple[Bases, Int[Array, ""]]:
    """Replace each factor of ``new`` that failed to decompose by ``old``; count them.

    A solver that does not converge on an accelerator returns NaN and raises nothing.
    """
    failed: list[Array] = []

    def pick(fresh: Side, stale: Side) -> Side:
        if isinstance(fresh.data, Spectrum):
            ok = _counted(jnp.isfinite(fresh.data.values).all(-1), failed)
        elif fresh.is_matrix:
            # If an inverse failed, all its entries are NaN, so one entry is enough to check.
            ok = _counted(jnp.isfinite(fresh.data[..., 0, 0]), failed)
        else:
            ok = _counted(jnp.isfinite(fresh.data).all(), failed)
        kept = lambda x, y: jnp.where(over_stack(ok, x), x, y)
        return fresh.with_data(jax.tree.map(kept, fresh.data, stale.data))

    return new.map_sides(pick, old), sum(failed, jnp.zeros((), jnp.int32))


def _counted(ok: Bool[Array, "..."], failed: list[Array]) -> Bool[Array, "..."]:
    failed.append((~ok).sum(dtype=jnp.int32))
    return ok
