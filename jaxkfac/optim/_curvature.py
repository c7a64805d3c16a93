"""Average, refresh and precondition: what an optimizer keeps of the curvature."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import MeshAxis, covered_indices
from jaxkfac.factors import (
    Factors,
    check_decay,
    check_factors,
    check_like,
    of_parameters,
    update_average,
    with_origin,
    without_corrections,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.linalg import Damping
from jaxkfac.optim._preconditioner import Preconditioner
from jaxkfac.optim._refresh import RefreshInGraph
from jaxkfac.optim._schedules import Clipping, clipping_of, clipping_of_init
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import covered_leaves
from jaxkfac.optim._watch import begun_anew, check_measured_between

PyTree = Any


def shapes_of(like: Factors) -> Factors:
    """Shapes of the factors by which parameters are preconditioned.

    Raises:
        TypeError: ``like`` are no factors.
    """
    check_like(like)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), without_loss_terms(like))
    return of_parameters(like)


@dataclasses.dataclass(frozen=True, eq=False)
class Curvature:
    """The average of the factors, when it is decomposed, and how gradients are preconditioned.

    Its state is two fields of the optimizer's, ``stacked_average`` and ``stacked_bases``; the
    refresh reads ``step`` as well.

    Attributes:
        like: Shapes of the factors.
        stacks: Which layers are one stacked layer in the state.
        method: What is kept of a refresh.
        decay: Of the average.
        refresh_every: Steps from one refresh to the next.
        stagger: Whether a refresh is spread over these steps.
        clipping: Settings of eigenvalue clipping; ``None`` where they are traced.
    """

    like: Factors
    stacks: Stacks
    method: Preconditioner
    decay: ArrayLike
    refresh_every: ArrayLike
    stagger: bool
    clipping: Clipping | None

    def __post_init__(self) -> None:
        check_decay(self.decay)
        measures = self.like.corrections is not None
        self.method.check_stagger(stagger=self.stagger, measures=measures)
        check_measured_between(self.refresh_every, measures=measures)

    @functools.cached_property
    def covered(self) -> Collection[str]:
        """Paths of the parameters that have a block."""
        return covered_indices(self.like.layers)

    @functools.cached_property
    def stacked_like(self) -> Factors:
        """Shapes of the factors of the stacked model."""
        return jax.eval_shape(self.stacks.factors, self.like)

    @functools.cached_property
    def stacked_paths(self) -> Collection[str]:
        """Paths of the stacked parameters that have a block."""
        return covered_indices(self.stacked_like.layers)

    @functools.cached_property
    def refresh(self) -> RefreshInGraph:
        """When, and of which layers."""
        like = without_corrections(self.stacked_like)
        return RefreshInGraph(self.method, like, self.refresh_every, stagger=self.stagger)

    def initial(self, damping: Damping) -> tuple[Factors, Any]:
        """The average of nothing, and bases or inverses of factors that are the identity."""
        bare = without_corrections(self.stacked_like)
        bases = self.method.initial(bare, damping, clipping_of_init(self.clipping))
        return zeros_like(bare), self.method.with_corrections(bases, self.stacked_like.corrections)

    def checked(self, factors: Any) -> Factors:
        """The factors of an update, once they are of these layers.

        Raises:
            TypeError: they are none.
            ValueError: they are of other layers, or hold measured eigenvalues that are of no use.
        """
        if isinstance(factors, Factors):
            factors = of_parameters(without_loss_terms(factors))
        check_factors(factors, self.like)
        measures = factors.corrections is not None
        self.method.check_stagger(stagger=self.stagger, measures=measures)
        self.method.check_measured(factors)
        check_measured_between(self.refresh_every, measures=measures)
        return factors

    def stacked(self, factors: Factors | None) -> Factors | None:
        """The factors of the stacked model.

        Unfused from what made them: XLA would write a matrix and its finiteness side by side, and
        copy what a panel is written into.
        """
        if factors is None:
            return None
        return jax.lax.optimization_barrier(self.stacks.factors(factors))

    def averaged(self, state: Any, new: Factors | None) -> tuple[Factors, Int[Array, ""]]:
        """The average with a step's factors, and how many of its matrices began anew."""
        if new is None:
            return state.stacked_average, jnp.zeros((), jnp.int32)
        new = without_corrections(new)
        return begun_anew(update_average(state.stacked_average, new, self.decay), new)

    def refreshed(
        self,
        state: Any,
        average: Factors,
        new: Factors | None,
        damping: Damping,
        *,
        axis: MeshAxis | None = None,
        from_host: Any = None,
    ) -> tuple[Any, Int[Array, ""]]:
        """What gradients are preconditioned with at a step, and how many decompositions failed."""
        held, measured = self.method.advanced(state.stacked_bases, new, self.decay)
        if self.method.on_host:
            bases = held if from_host is None else from_host
            kept, due = jnp.zeros((), jnp.int32), jnp.asarray(from_host is not None)
        else:
            clipping = clipping_of(state.stacked_bases, self.clipping)
            bases, kept = self.refresh(state, held, average, damping, clipping, axis)
            due = self.refresh.is_due(state) & (average.terms > 0)
        return self.method.measured_since(bases, measured, due), kept

    def fresh(self, state: Any, average: Factors, damping: Damping) -> Any:
        """What a refresh makes of an average, by every device for itself."""
        clipping = clipping_of(state.stacked_bases, self.clipping)
        return self.method.fresh(average, damping, clipping, None)

    def unchanged(self, state: Any, new: Factors | None) -> Any:
        """The bases of a step that is skipped, in the structure that one with factors has."""
        bases, measured = self.method.advanced(state.stacked_bases, new, None)
        return self.method.measured_since(bases, measured, jnp.asarray(False))

    def from_host(self, state: Any, factors: Factors | None) -> Any:
        """What the host makes of the average where a refresh is due; else ``None``."""
        new = None if factors is None else self.stacks.factors(factors)
        average, _ = self.averaged(state, new)
        if not (self.refresh.is_due(state) and average.terms > 0):
            return None
        clipping = clipping_of(state.stacked_bases, self.clipping)
        return self.method.fresh(average, 0.0, clipping, None)

    def as_kept(self, factors: Factors, state: Any) -> Factors:
        """With the origin of the average: the state keeps its structure, whatever comes."""
        return with_origin(factors, state.stacked_average.origin)


@dataclasses.dataclass(frozen=True, eq=False)
class Others:
    """The transformation of the parameters that no factor covers, or none.

    Attributes:
        tx: The transformation, masked; ``None`` if these go the way of the rest.
        covered: Paths of the parameters that are not its business.
    """

    tx: Any
    covered: Collection[str]

    @classmethod
    def of(cls, others: optax.GradientTransformation | None, covered: Collection[str]) -> "Others":
        """Of an optax transformation for everything but the covered parameters."""
        if others is None:
            return cls(None, covered)

        def not_ours(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda ours: not ours, covered_leaves(tree, covered))

        return cls(optax.masked(others, not_ours), covered)

    def init(self, params: PyTree) -> Any:
        """Its state."""
        return () if self.tx is None else self.tx.init(params)

    def extra(self, **given: Any) -> dict[str, Any]:
        """What is handed on to it of the arguments that are also ours."""
        if self.tx is None:
            return {}
        return {name: x for name, x in given.items() if x is not None}

    def joined(self, updates: PyTree, rest: Any) -> PyTree:
        """The covered leaves of ``updates``, and its own of ``rest``."""
        if self.tx is None:
            return updates
        ours = covered_leaves(updates, self.covered)
        return jax.tree.map(lambda mine, x, y: x if mine else y, ours, updates, cast(Any, rest))
