"""When bases or inverses are refreshed, and of which layers."""

import dataclasses
import math
from typing import Any, cast

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import MeshAxis
from jaxkfac.factors import Factors, balanced_groups
from jaxkfac.interception import Layer
from jaxkfac.linalg import Damping
from jaxkfac.optim._preconditioner import Preconditioner, tables_of
from jaxkfac.optim._schedules import Clipping
from jaxkfac.optim._trees import once_where

_FACTORS = ("a_sums", "a_counts", "g_sums", "diagonals")


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
        self._groups: list[tuple[Any, tuple[Layer, ...]]] = [(0, like.layers)]
        if not stagger:
            return
        if isinstance(every, Tracer):
            raise TypeError(
                "stagger=True divides the layers over refresh_every steps, which are traced here: "
                "optax.inject_hyperparams(jk.kfac, static_args=('refresh_every', 'stagger', ...))"
            )
        number = int(cast(int, every))
        groups = balanced_groups(like.layers, number, _work)
        self._groups = [(i * number // len(groups), group) for i, group in enumerate(groups)]

    def is_due(self, state: Any) -> Any:
        """Whether all layers are due: at the first step with factors, and then by the step."""
        return self._due(state, 0)

    def is_missed(self, state: Any, average: Factors) -> Any:
        """Whether a refresh is due but there are no factors to compute it from."""
        return (state.step % self._every == 0) & (average.terms == 0)

    def _due(self, state: Any, offset: int) -> Any:
        return self._is_first(state) | (state.step % self._every == offset)

    def _is_first(self, state: Any) -> Any:
        # Factors may be collected at some steps only, the first later than step 0. After a burn-in
        # the average is not empty at step 0.
        return (state.stacked_average.terms == 0) | (state.step == 0)

    def __call__(
        self,
        state: Any,
        bases: Any,
        average: Factors,
        damping: Damping,
        clipping: Clipping,
        axis: MeshAxis | None,
    ) -> tuple[Any, Int[Array, ""]]:
        """The bases or inverses after this step, and how many decompositions failed."""
        failed, first = jnp.zeros((), jnp.int32), self._is_first(state)
        for offset, layers in self._groups:
            subset = _part_of(average, layers)

            # In turn: each group waits for the failure count of the groups before it.
            def renewed(carry: tuple[Any, Array], subset: Factors = subset) -> tuple[Any, Array]:
                current, failed = carry
                new, more = self._method.renewed(current, first, subset, damping, clipping, axis)
                return _written(current, new), failed + more

            due = self._due(state, offset) & (average.terms > 0)
            bases, failed = once_where(due, renewed, (bases, failed))
        return bases, failed


def _work(group: list[Layer]) -> float:
    """The work of decomposing the factors, in cubes of their sizes."""
    inputs = {layer.input: layer for layer in reversed(group)}.values()
    work = sum(math.prod(x.stack) * x.in_features**3 for x in inputs if x.a_dense)
    work += sum(math.prod(x.stack) * x.out_features**3 for x in group if x.g_dense)
    return float(work)


def _part_of(factors: Factors, layers: tuple[Layer, ...]) -> Factors:
    """The factors of some layers; all readers of their inputs must be among them."""
    if layers == factors.layers:
        return factors
    names = {layer.name for layer in layers}
    tables = {
        table: {k: x for k, x in getattr(factors, table).items() if k in names}
        for table in _FACTORS
    }
    return dataclasses.replace(factors, layers=layers, **tables)


def _written(bases: Any, group: Any) -> Any:
    """``bases`` with the layers of ``group`` replaced."""
    tables = {table: getattr(bases, table) | getattr(group, table) for table in tables_of(group)}
    return dataclasses.replace(bases, **tables)
