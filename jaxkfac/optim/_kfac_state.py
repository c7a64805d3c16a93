"""The state of K-FAC, and whether it belongs to the given model."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, Inverses
from jaxkfac.optim._adaptation import AdaptationState
from jaxkfac.optim._stacks import Stacks
from jaxkfac.optim._trees import sharded_like
from jaxkfac.optim._watch import StateWatch


class KfacState(NamedTuple):
    """State of :func:`kfac`.

    Layers of one shape are stored stacked; ``average`` and ``bases`` return those of the model.

    Attributes:
        step: Updates made so far, int32; skipped ones do not count, nor those before every group of
            ``collect=`` has come. Schedules and the refresh read it.
        stacked_average: Exponential average of the factors of the stacked model, as sums and
            counts; one triangle of each matrix if ``kfac`` is ``packed``.
        stacked_bases: Eigenbases of that average at the last refresh, or the inverses of its
            damped factors, which are packed like the average.
        momentum: A tree like the parameters, without those that ``others`` handles. If the
            quadratic model chooses learning rate or momentum, it is the last update.
        others: State of the ``others`` transformation.
        skipped: Updates left out because a gradient or a factor was not finite, a factor was too
            large to be averaged (``watch.outsized``), or factors were a sum of different groups of
            ``collect=``, int32.
        kept: Decompositions that were not finite, so that the previous result stayed in place,
            int32.
        missed: Refreshes that were due before any factor had come, int32: the first, and each
            ``refresh_every`` steps later. Above 1, collection and accumulation do not meet.
        stacks: Which layers are stacked; it holds no arrays.
        watch: Counters that :func:`check_state` reads; ``diverged`` is one of them.
        adaptation: Damping, rates and the last trial if ``kfac`` adapts them; else ``()``.
    """

    step: Int[Array, ""]
    stacked_average: Factors
    stacked_bases: Eigenbases | Inverses
    momentum: ArrayTree
    others: Any
    skipped: Int[Array, ""]
    kept: Int[Array, ""]
    missed: Int[Array, ""]
    stacks: Stacks
    watch: StateWatch
    adaptation: AdaptationState | tuple[()] = ()

    @property
    def diverged(self) -> Int[Array, ""]:
        """Updates in a row whose ``value=`` was not finite, or far above the first one."""
        return self.watch.diverged

    @property
    def average(self) -> Factors:
        """Exponential average of the factors, as sums and counts."""
        return _read(self._factors_of_the_model, self.stacked_average)

    @property
    def statistics(self) -> Factors:
        """The average, with the eigenvalues measured since the last refresh, if any."""
        corrections = None
        if isinstance(self.stacked_bases, Eigenbases):
            corrections = self.stacked_bases.corrections
        stacked = dataclasses.replace(self.stacked_average, corrections=corrections)
        return _read(self._factors_of_the_model, stacked)

    def _factors_of_the_model(self, stacked: Factors) -> Factors:
        return self.stacks.unstacked(stacked).unpacked()

    @property
    def bases(self) -> Eigenbases:
        """Eigenbases of the average at the last refresh.

        Raises:
            ValueError: the state holds inverses.
        """
        if isinstance(self.stacked_bases, Inverses):
            raise ValueError(
                "this state keeps inverses of damped factors, not eigenbases: build "
                "jk.kfac(..., inverse='eigh'), or take jk.eigendecompose(state.average)"
            )
        return _read(self.stacks.unstacked, self.stacked_bases)


def _read(function: Callable[[Any], Any], stacked: ArrayTree) -> Any:
    """``function(stacked)``; if ``stacked`` holds shapes, the shapes of the result."""
    shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(stacked))
    return jax.eval_shape(function, stacked) if shapes else function(stacked)


def state_sharded_like(new: KfacState, old: KfacState) -> KfacState:
    """Shard a new state like the old one; newly measured eigenvalues are replicated."""
    new_bases, before = new.stacked_bases, old.stacked_bases
    if not (_measures(new_bases) and not _measures(before)):
        return sharded_like(new, old)
    assert isinstance(new_bases, Eigenbases)
    bare = dataclasses.replace(new_bases, corrections=None)
    resharded = sharded_like(new._replace(stacked_bases=bare), old)
    both = dataclasses.replace(resharded.stacked_bases, corrections=new_bases.corrections)
    return resharded._replace(stacked_bases=both)


def warn_of_growth(state: KfacState, factors: Factors, *, stacklevel: int) -> None:
    """Warn that ``lax.scan`` is going to refuse the state, and name the remedy."""
    if factors.corrections is not None and not _measures(state.stacked_bases):
        warnings.warn(
            "kfac: the factors hold eigenvalues measured in eigenbases (bases=), and like= has "
            "none, so that the state gains their average in this call: jit compiles it once more, "
            "and lax.scan refuses a carry that changes its form. Make like= of the bases of a "
            "first state: like=stats.factor_shapes(params, batch, bases=jax.eval_shape(tx.init, "
            "params).bases)",
            stacklevel=stacklevel,
        )


def _measures(bases: Eigenbases | Inverses) -> bool:
    return isinstance(bases, Eigenbases) and bases.corrections is not None


def check_same_model(
    state: KfacState, stacks: Stacks, bases_type: type, *, adapts: bool, like: Factors
) -> None:
    """Refuse a state of another model, or with another preconditioner."""
    if not isinstance(state.stacks, Stacks):
        raise ValueError(
            "kfac: the state was saved by an earlier version, which kept each layer by itself: "
            "make a new one with tx.init(params), and give it the momentum and step of the old"
        )
    if state.stacks != stacks:
        raise ValueError(
            "kfac: the state belongs to another model than like=: make one with tx.init(params)"
        )
    if not isinstance(state.stacked_bases, bases_type):
        raise ValueError(
            f"kfac: the state keeps {type(state.stacked_bases).__name__}, and with this inverse= "
            f"and damping_mode= expected {bases_type.__name__}: make a new one with tx.init(params)"
        )
    check_storage("kfac", state.stacked_average, like, remedy="build it with")
    if isinstance(state.adaptation, AdaptationState) is not adapts:
        raise ValueError(
            f"kfac: the state {'does not adapt' if adapts else 'adapts'} itself, and this kfac "
            f"{'does' if adapts else 'does not'}: make a new one with tx.init(params)"
        )


def check_storage(optimizer: str, average: Factors, like: Factors, *, remedy: str) -> None:
    """Refuse a state whose average is stored otherwise than ``like``.

    Args:
        optimizer: Its name.
        average: The average in the state.
        like: The shapes that the optimizer was built with.
        remedy: What takes another ``packed=``, as the middle of a sentence.
    """
    is_packed = average.is_packed
    if is_packed is not like.is_packed:
        stored, expected = ("packed", "dense") if is_packed else ("dense", "packed")
        raise ValueError(
            f"{optimizer}: the state's average is {stored}, and this {optimizer} keeps it "
            f"{expected}: {remedy} packed={is_packed}, or make a new state with tx.init(params)"
        )
