"""When bases or inverses are refreshed, and of which layers."""

import dataclasses
import math
from collections import defaultdict
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.blocks import Factors
from jaxkfac.curvature import Eigenbases, Inverses, MeshAxis
from jaxkfac.factors import balanced_groups
from jaxkfac.interception import Layer
from jaxkfac.linalg.spectral import Damping
from jaxkfac.optim._preconditioner import Bases, Preconditioner
from jaxkfac.optim._schedules import Clipping
from jaxkfac.optim._trees import once_where

DECAY = 0.95  # of a step
EACH_STEP = 10  # steps between refreshes, of factors that are collected at each step


@runtime_checkable
class RefreshedState(Protocol):
    """What a refresh reads in the state of an optimizer."""

    @property
    def step(self) -> Int[Array, ""]: ...
    @property
    def stacked_average(self) -> Factors: ...
    @property
    def stacked_bases(self) -> Eigenbases | Inverses: ...


class Periods(NamedTuple):
    """How often factors come and are decomposed, and how fast their average forgets.

    Attributes:
        every: Steps from one collection of factors to the next.
        refresh_every: Steps from one refresh to the next; it may be traced.
        decay: Decay of the average, for each step that brings factors.
    """

    every: int
    refresh_every: Any
    decay: Any

    @classmethod
    def of(
        cls,
        like: Factors,
        refresh_every: ArrayLike | str,
        decay: ArrayLike | str,
        *,
        default: int,
        stagger: bool = False,
    ) -> "Periods":
        """The periods for the factors that come.

        Args:
            like: Shapes of the factors; their ``origin`` says when they are collected.
            refresh_every: A number, or ``"auto"``: that of the collection if this is at some steps,
                ``default`` if it is for refreshes, otherwise ``EACH_STEP``.
            decay: A number, or ``"auto"``: 0.95 for each step from one collection to the next.
            default: Steps between refreshes for which factors are collected.
            stagger: Whether refreshes of layers are spread over all steps.
        """
        every = 1 if like.origin is None else like.origin.every
        auto = isinstance(refresh_every, str)
        if every == "refresh":
            period = default if auto else refresh_every
            # Where layers take turns, a refresh is due at any step; and so if it is traced.
            in_turns = stagger or like.turn is not None
            every = int(period) if isinstance(period, int | np.integer) and not in_turns else 1
        if auto:
            refresh_every = every if every > 1 else EACH_STEP
        return cls(every, refresh_every, DECAY**every if isinstance(decay, str) else decay)


class RefreshGroup(NamedTuple):
    """Layers that are refreshed at one step.

    Attributes:
        offset: The step, modulo the number of steps from one refresh to the next.
        layers: The layers.
        iterations: The first of the iterations of their scan, and the one after the last; ``None``
            for all.
    """

    offset: int
    layers: tuple[Layer, ...]
    iterations: tuple[int, int] | None = None


class RefreshInGraph:
    """Refreshes of all layers at once, or of groups of layers in turn.

    Args:
        method: What is computed from an average.
        like: Shapes of the factors.
        every: Steps from one refresh of a layer to the next.
        stagger: Whether layers are divided into groups.

    Raises:
        TypeError: ``every`` is traced, and ``stagger`` divides by it.
    """

    def __init__(
        self, method: Preconditioner, like: Factors, every: ArrayLike, *, stagger: bool
    ) -> None:
        self._method, self._every = method, every
        self._groups = [RefreshGroup(0, like.layers)]
        if not stagger:
            return
        if isinstance(every, Tracer):
            raise TypeError(
                "stagger=True divides the layers over refresh_every steps, which are traced here: "
                "optax.inject_hyperparams(jk.kfac, static_args=('refresh_every', 'stagger', ...))"
            )
        number = int(cast(int, every))
        scans = _scanned_in_turns(like)
        scanned = {layer for layers in scans.values() for layer in layers}
        others = tuple(layer for layer in like.layers if layer not in scanned)
        groups = balanced_groups(others, number, _work)
        self._groups = [
            RefreshGroup(i * number // len(groups), group) for i, group in enumerate(groups)
        ]
        for length, layers in scans.items():
            for i in range(min(number, length)):
                parts = min(number, length)
                rows = i * length // parts, (i + 1) * length // parts
                self._groups.append(RefreshGroup(i * number // parts, layers, rows))

    def is_due(self, state: RefreshedState) -> Any:
        """Whether all layers are due: at the first step with factors, and then by the step."""
        return self._due(state, 0)

    def is_missed(self, state: RefreshedState, average: Factors) -> Any:
        """Whether a refresh is due but there are no factors to compute it from."""
        return (state.step % self._every == 0) & (average.terms == 0)

    def _due(self, state: RefreshedState, offset: int) -> Any:
        return self._is_first(state) | (state.step % self._every == offset)

    def _is_first(self, state: RefreshedState) -> Any:
        # Factors may be collected at some steps only, the first later than step 0. After a burn-in
        # the average is not empty at step 0.
        return (state.stacked_average.terms == 0) | (state.step == 0)

    def __call__(
        self,
        state: RefreshedState,
        bases: Bases,
        average: Factors,
        damping: Damping,
        clipping: Clipping,
        axis: MeshAxis | None,
    ) -> tuple[Bases, Int[Array, ""]]:
        """The bases or inverses after this step, and how many decompositions failed."""
        failed, first = jnp.zeros((), jnp.int32), self._is_first(state)
        for group in self._groups:
            # In turn: each group waits for the failure count of the groups before it.
            def renewed(carry: tuple[Any, Array], group: RefreshGroup = group) -> tuple[Any, Array]:
                current, failed = carry
                subset, old = _part_of(average, group), _rows_of(current, group)
                new, more = self._method.renewed(old, first, subset, damping, clipping, axis)
                return _written(current, new, group), failed + more

            due = self._due(state, group.offset) & (average.terms > 0)
            bases, failed = once_where(due, renewed, (bases, failed))
        return bases, failed


def _work(group: list[Layer]) -> float:
    """The work of decomposing the factors, in cubes of their sizes."""
    inputs = {layer.input: layer for layer in reversed(group)}.values()
    work = sum(math.prod(x.stack) * x.in_features**3 for x in inputs if x.a_dense)
    work += sum(math.prod(x.stack) * x.out_features**3 for x in group if x.g_dense)
    return float(work)


def _scanned_in_turns(like: Factors) -> dict[int, tuple[Layer, ...]]:
    """``{length of a scan: layers}`` of the layers whose iterations are refreshed in turn.

    They are those whose factors come in turns, except readings of a parameter that has other
    readings elsewhere, because all of its readings are refreshed together.
    """
    if like.turn is None:
        return {}
    readings = defaultdict(set)
    for layer in like.layers:
        readings[layer.weight.path].add(like.turn.counts[layer.name].shape)
    scans: dict[int, list[Layer]] = defaultdict(list)
    apart = {x.input for x in like.layers if len(readings[x.weight.path]) > 1}
    for layer in like.layers:
        if (length := like.turn.counts[layer.name].shape) and layer.input not in apart:
            scans[length[0]].append(layer)
    return {length: tuple(layers) for length, layers in scans.items()}


def _part_of(factors: Factors, group: RefreshGroup) -> Factors:
    """The factors of a group; all readers of their inputs must be among its layers."""
    if group.layers == factors.layers and group.iterations is None:
        return factors
    names = {layer.name for layer in group.layers}
    sides = {place: x for place, x in factors.sides.items() if place.key in names}
    layers = group.layers
    if group.iterations is not None:
        rows = slice(*group.iterations)
        sides = {place: side.map_stack(lambda x: x[rows]) for place, side in sides.items()}
        stack = (rows.stop - rows.start,)
        layers = tuple(dataclasses.replace(x, stack=(*stack, *x.stack[1:])) for x in layers)
    return factors.with_sides(sides, layers=layers, turn=None)


def _rows_of(bases: Bases, group: RefreshGroup) -> Bases:
    """The bases or inverses of a group, as its refresh reads them."""
    if group.iterations is None:
        return bases
    rows = slice(*group.iterations)
    names = {name for layer in group.layers for name in (layer.name, layer.input)}
    sides = bases.sides.items()
    return bases.with_sides(
        {place: side.map_stack(lambda x: x[rows]) for place, side in sides if place.key in names}
    )


def _written(bases: Bases, new: Bases, group: RefreshGroup) -> Bases:
    """``bases`` with those of ``group`` replaced."""
    old, sides = bases.sides, new.sides
    if group.iterations is not None:
        start, _ = group.iterations

        def write(x: Array, rows: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0)

        sides = {place: old[place].map_stack(write, side) for place, side in sides.items()}
    return bases.with_sides({**old, **sides})
