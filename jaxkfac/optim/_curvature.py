"""The curvature inside an optimizer: average, refresh and precondition."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import (
    Factors,
    check_decay,
    check_factors,
    check_like,
    check_turn,
    number_of_turns,
    of_parameters,
    stored_like,
    update_average,
    with_origin,
    without_corrections,
    without_loss_terms,
    zeros_like,
)
from jaxkfac.curvature import Eigenbases, MeshAxis, covered_indices
from jaxkfac.flax import serializable
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._preconditioner import Preconditioner
from jaxkfac.optim._refresh import Periods, RefreshedState, RefreshInGraph
from jaxkfac.optim._schedules import Clipping, clipping_of, clipping_of_init
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import checked_state, covered_leaves
from jaxkfac.optim._watch import begun_anew, check_measured_between

# ---------------- which factors an optimizer takes


def shapes_of(like: Factors) -> Factors:
    """Shapes of the factors that precondition parameters.

    Raises:
        TypeError: ``like`` is not factors.
        ValueError: ``like`` is the factors of a single step, where they come in turns.
    """
    check_like(like)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), without_loss_terms(like))
    if like.origin is not None:  # a state says when factors come, and is of no single step
        like = with_origin(like, dataclasses.replace(like.origin, axes=None))
    return of_parameters(like)


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FactorShapes:
    """Which factors an optimizer takes. A pytree without arrays.

    Attributes:
        leaves: Shapes and dtypes of the factors, static.
        tree: Structure of the factors, static.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, like: Factors) -> "FactorShapes":
        """The factor shapes of ``like``."""
        leaves, tree = jax.tree.flatten(like)
        return cls(tuple(leaves), tree)

    @property
    def like(self) -> Factors:
        """The factors, as shapes."""
        return jax.tree.unflatten(self.tree, self.leaves)


def shapes_in(state: Any) -> Factors:
    """Shapes of the factors that the optimizer of a state takes."""

    def statistics(state: Any) -> Factors:
        return state.statistics.packed_like(state.stacked_average)

    return jax.eval_shape(statistics, state)


# `optax.chain` and the like pass parameters alone to the `init` of what they contain.
_KNOWN: ContextVar[tuple[Callable[[], Factors], list[int]] | None] = ContextVar(
    "factor_shapes", default=None
)


@contextlib.contextmanager
def factors_at_init(shapes: Callable[[], Factors]) -> Iterator[list[int]]:
    """Within it, optimizers that were built without ``like=`` take these factors at ``init``.

    Yields:
        The steps from one collection of factors to the next, of each of these optimizers.
    """
    periods: list[int] = []
    token = _KNOWN.set((shapes, periods))
    try:
        yield periods
    finally:
        _KNOWN.reset(token)


class InitOfFactors(Protocol):
    """``init`` of an optimizer that takes factors."""

    def __call__(self, params: Any, *, like: Factors | None = None) -> Any: ...


class FactorTransformation(optax.GradientTransformationExtraArgs):
    """A transformation of optax whose ``init`` also takes ``like=``, which factors there are."""

    init: InitOfFactors  # pyright: ignore[reportIncompatibleVariableOverride]


def as_optax(
    name: str,
    like: Factors | None,
    build: Callable[[Factors], Any],
    state_type: type,
) -> FactorTransformation:
    """A transformation of optax, whose factors are known when it is built or at ``init``.

    Args:
        name: What the optimizer is called in messages.
        like: Which factors it takes; ``None``: those of ``init(params, like=like)``.
        build: Builds the optimizer's ``init`` and ``update`` for shapes of factors.
        state_type: Type of its state, which says which factors it takes.
    """
    if like is not None:
        tx = build(shapes_of(like))

        def init_once(params: ArrayTree, *, like: Factors | None = None) -> Any:
            if like is not None:
                raise ValueError(
                    f"{name}: like= is in jk.{name}(like=) already, and init has another: leave "
                    "one of them out"
                )
            return tx.init(params)

        return FactorTransformation(init_once, cast(Any, tx.update))

    @functools.lru_cache(maxsize=8)  # outside of jit, each optimizer caches its traces
    def built(shapes: FactorShapes) -> Any:
        return build(shapes.like)

    def init(params: ArrayTree, *, like: Factors | None = None) -> Any:
        known = _KNOWN.get()
        if like is None and known is None:
            raise ValueError(
                f"{name}: which factors it takes is not known: give tx.init(params, like=like) or "
                f"jk.{name}(..., like=like), with like = stats.factor_shapes(params, batch), or "
                "train with jk.Optimizer, which knows them"
            )
        shapes, periods = known or (None, [])
        like = shapes() if like is None and shapes is not None else like
        like = shapes_of(cast(Factors, like))
        every = built(FactorShapes.of(like)).incoming.periods.every
        periods.append(every)
        if like.origin is not None:  # the state says it to every update
            like = with_origin(like, dataclasses.replace(like.origin, every=every))
        return built(FactorShapes.of(like)).init(params)

    def update(updates: ArrayTree, state: Any, params: Any = None, **extra: Any) -> Any:
        state = checked_state(f"{name}: the state", state, state_type)
        return built(FactorShapes.of(shapes_of(shapes_in(state)))).update(
            updates, state, params, **extra
        )

    return FactorTransformation(init, update)


# ---------------- the average, its decomposition, and the preconditioning


@dataclasses.dataclass(frozen=True, eq=False)
class Curvature:
    """The average of the factors, its decomposition, and the preconditioning of gradients.

    Its state is two fields of the optimizer's state, ``stacked_average`` and ``stacked_bases``; the
    refresh also reads ``step``.

    Attributes:
        like: Shapes of the factors.
        stacks: Which layers form one stacked layer in the state.
        method: What is computed at a refresh and stored.
        periods: How often factors come and are decomposed, and the decay of their average.
        stagger: Whether a refresh is spread over these steps.
        clipping: Settings of eigenvalue clipping; ``None`` if they are traced.
    """

    like: Factors
    stacks: Stacks
    method: Preconditioner
    periods: Periods
    stagger: bool
    clipping: Clipping | None

    def __post_init__(self) -> None:
        check_decay(self.periods.decay)
        measures = self.like.corrections is not None
        self.method.check_stagger(stagger=self.stagger, measures=measures)
        check_measured_between(self.periods.refresh_every, measures=measures)

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
        """The schedule of refreshes, and the layers of each."""
        like = without_corrections(self.stacked_like)
        every = self.periods.refresh_every
        return RefreshInGraph(self.method, like, every, stagger=self.stagger)

    def initial(self, damping: Damping) -> tuple[Factors, Any]:
        """An empty average, and bases or inverses of identity factors."""
        bare = without_corrections(self.stacked_like)
        bases = self.method.initial(bare, damping, clipping_of_init(self.clipping))
        return zeros_like(bare), self.method.with_corrections(bases, self.stacked_like.corrections)

    def checked(self, factors: Any) -> Factors:
        """Check the factors of an update, and return those of its layers.

        Raises:
            TypeError: they are not factors.
            ValueError: they have other layers, measured eigenvalues that cannot be used, or are
                complete where they should come in turns, or the reverse.
        """
        if isinstance(factors, Factors):
            factors = of_parameters(without_loss_terms(factors))
        check_factors(factors, self.like)
        check_turn("factors", factors.turn, number_of_turns(self.like.turn))
        factors = stored_like(factors, self.like)
        measures = factors.corrections is not None
        self.method.check_stagger(stagger=self.stagger, measures=measures)
        self.method.check_measured(factors)
        check_measured_between(self.periods.refresh_every, measures=measures)
        return factors

    def stacked(self, factors: Factors | None) -> Factors | None:
        """The factors of the stacked model.

        The barrier keeps XLA from fusing this with what computed the factors: it would write a
        matrix and its finiteness side by side, and copy the buffer that a panel is written into.
        """
        if factors is None:
            return None
        return jax.lax.optimization_barrier(self.stacks.factors(factors))

    def is_filling(self, average: Factors) -> Any:
        """Whether groups of factors are still to come, so that no update is made.

        ``None`` if factors do not come in turns.
        """
        return None if self.like.turn is None else average.terms == 0

    def averaged(self, average: Factors, new: Factors | None) -> tuple[Factors, Int[Array, ""]]:
        """The average after a step's factors, and how many of its matrices restarted."""
        if new is None:
            return average, jnp.zeros((), jnp.int32)
        new = without_corrections(new)
        return begun_anew(update_average(average, new, self.periods.decay), new)

    def refreshed(
        self,
        state: RefreshedState,
        average: Factors,
        new: Factors | None,
        damping: Damping,
        *,
        axis: MeshAxis | None = None,
        from_host: Eigenbases | None = None,
    ) -> tuple[Any, Int[Array, ""]]:
        """The bases or inverses for a step, and how many decompositions failed."""
        bare_bases, measured = self.method.advanced(state.stacked_bases, new, self.periods.decay)
        if self.method.on_host:
            bases = bare_bases if from_host is None else from_host
            num_failed, due = jnp.zeros((), jnp.int32), jnp.asarray(from_host is not None)
        else:
            clipping = clipping_of(state.stacked_bases, self.clipping)
            bases, num_failed = self.refresh(state, bare_bases, average, damping, clipping, axis)
            due = self.refresh.is_due(state) & (average.terms > 0)
        return self.method.measured_since(bases, measured, due), num_failed

    def fresh(self, state: RefreshedState, average: Factors, damping: Damping) -> Any:
        """The result of a refresh with this average; every device computes all of it."""
        clipping = clipping_of(state.stacked_bases, self.clipping)
        return self.method.fresh(average, damping, clipping, None)

    def unchanged(self, state: RefreshedState, new: Factors | None) -> Any:
        """The bases of a skipped step, in the structure of a step with factors."""
        bases, measured = self.method.advanced(state.stacked_bases, new, None)
        return self.method.measured_since(bases, measured, jnp.asarray(False))

    def from_host(self, state: RefreshedState, factors: Factors | None) -> Any:
        """The host's bases of the average if a refresh is due, otherwise ``None``."""
        new = None if factors is None else self.stacks.factors(factors)
        average, _ = self.averaged(state.stacked_average, new)
        if not (self.refresh.is_due(state) and average.terms > 0):
            return None
        clipping = clipping_of(state.stacked_bases, self.clipping)
        return self.method.fresh(average, 0.0, clipping, None)

    def as_kept(self, factors: Factors, state: RefreshedState) -> Factors:
        """The factors with the origin of the average, so that the state keeps its structure."""
        return with_origin(factors, state.stacked_average.origin)


@dataclasses.dataclass(frozen=True, eq=False)
class Others:
    """The transformation of the parameters that no factor covers, or none.

    Attributes:
        tx: The transformation, masked; ``None`` if these parameters follow gradient descent.
        covered: Paths of the parameters that it does not handle.
    """

    tx: Any
    covered: Collection[str]

    @classmethod
    def of(cls, others: optax.GradientTransformation | None, covered: Collection[str]) -> "Others":
        """Mask an optax transformation to everything but the covered parameters."""
        if others is None:
            return cls(None, covered)

        def not_ours(tree: ArrayTree) -> ArrayTree:
            return jax.tree.map(lambda ours: not ours, covered_leaves(tree, covered))

        return cls(optax.masked(others, not_ours), covered)

    def init(self, params: ArrayTree) -> Any:
        """Its state."""
        return () if self.tx is None else self.tx.init(params)

    def extra(self, **arguments: Any) -> dict[str, Any]:
        """The arguments passed on to it, of those that ``kfac`` reads too."""
        if self.tx is None:
            return {}
        return {name: x for name, x in arguments.items() if x is not None}

    def joined(self, updates: ArrayTree, own_updates: ArrayTree) -> ArrayTree:
        """The covered leaves of ``updates``, and all other leaves of its own updates."""
        if self.tx is None:
            return updates
        ours = covered_leaves(updates, self.covered)
        return jax.tree.map(
            lambda mine, x, y: x if mine else y, ours, updates, cast(Any, own_updates)
        )
