"""When what K-FAC preconditions with is made anew, and of which layers."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.curvature import MeshAxis
from jaxkfac.factors import Factors
from jaxkfac.interception import Layer
from jaxkfac.linalg import Damping
from jaxkfac.optim._preconditioner import Preconditioner, keep_where_not_finite
from jaxkfac.optim._schedules import Clipping

_FACTORS = ("a_sums", "a_counts", "g_sums", "diagonals")


class RefreshInGraph:
    """A refresh of all layers at once, or of one part of them after the other.

    Args:
        method: What is made of an average.
        like: Shapes of the factors.
        every: Steps from one refresh of a layer to the next.
        stagger: Whether there are parts.

    Raises:
        TypeError: ``every`` is traced, and ``stagger`` counts by it.
    """

    def __init__(
        self, method: Preconditioner, like: Factors, every: ArrayLike, *, stagger: bool
    ) -> None:
        self._method, self._every = method, every
        self._parts: list[tuple[Any, tuple[Layer, ...]]] = [(0, like.layers)]
        if not stagger:
            return
        if isinstance(every, Tracer):
            raise TypeError(
                "stagger=True divides the layers over refresh_every steps, which are traced here: "
                "optax.inject_hyperparams(jk.kfac, static_args=('refresh_every', 'stagger', ...))"
            )
        number = int(cast(int, every))
        parts = _parts(like.layers, number)
        self._parts = [(i * number // len(parts), part) for i, part in enumerate(parts)]

    def is_due(self, state: Any) -> Any:
        """Whether everything is: on the first step that has factors, and then by the step."""
        return self._due(state, 0)

    def is_missed(self, state: Any, average: Factors) -> Any:
        """Whether the period asks for a refresh, and there is nothing to make it of."""
        return (state.step % self._every == 0) & (average.terms == 0)

    def _due(self, state: Any, offset: int) -> Any:
        return self._is_first(state) | (state.step % self._every == offset)

    def _is_first(self, state: Any) -> Any:
        # Factors may be collected at some steps only, and the first of them later than step 0.
        # After a burn-in the average is not empty at step 0.
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
        """What holds after this step in place of ``bases``, and how many decompositions failed."""
        failed, first = jnp.zeros((), jnp.int32), self._is_first(state)
        for offset, layers in self._parts:
            part = _part_of(average, layers)

            # One after the other: each part waits for the number of those that failed before it.
            def renewed(carry: tuple[Any, Array], part: Factors = part) -> tuple[Any, Array]:
                held, failed = carry
                new = self._method.renewed(held, first, part, damping, clipping, axis)
                new, more = keep_where_not_finite(new, _like(held, new))
                return _written(held, new), failed + more

            due = self._due(state, offset) & (average.terms > 0)
            bases, failed = _where_due(due, renewed, (bases, failed))
        return bases, failed


def _where_due(due: Any, renewed: Callable[[Any], Any], held: Any) -> Any:
    """``renewed(held)`` where it is due, else ``held``.

    By a loop of one round or none, which writes what it carries in place. Of what one branch of a
    ``cond`` reads and the other passes on, XLA makes two copies at every step, due or not: 52 MB
    for the inverses of the autoencoder in ``benchmarks.optimizer_steps``. A loop has no derivative
    in reverse mode, so that of the ``cond`` is taken.
    """
    renewed, closed_over = jax.closure_convert(renewed, held)

    @jax.custom_jvp
    def loop(due: Any, held: Any, *closed_over: Any) -> Any:
        def once(carry: Any) -> Any:
            again, held = carry
            return again & False, renewed(held, *closed_over)

        return jax.lax.while_loop(lambda carry: carry[0], once, (due, held))[1]

    def branches(due: Any, held: Any, *closed_over: Any) -> Any:
        return jax.lax.cond(due, renewed, lambda held, *_: held, held, *closed_over)

    loop.defjvp(functools.partial(jax.jvp, branches))
    return loop(due, held, *closed_over)


def _parts(layers: tuple[Layer, ...], number: int) -> list[tuple[Layer, ...]]:
    """At most ``number`` parts of about equal work.

    The readers of one input stay together, and so do all readings of a parameter: which of them
    answers for it shows only among all.
    """
    joined: dict[Hashable, Hashable] = {}

    def root(of: Hashable) -> Hashable:
        while joined.setdefault(of, of) != of:
            of = joined[of]
        return of

    for layer in layers:
        joined[root(layer.input)] = root((layer.weight.path, layer.weight.index))
    readers: dict[Hashable, list[Layer]] = defaultdict(list)
    for layer in layers:
        readers[root(layer.input)].append(layer)
    parts: list[list[Layer]] = [[] for _ in range(min(number, len(readers)))]
    loads = [0.0] * len(parts)
    for group in sorted(readers.values(), key=_work, reverse=True):
        least = loads.index(min(loads))
        parts[least] += group
        loads[least] += max(_work(group), 1.0)
    return [tuple(part) for part in parts if part]


def _work(group: list[Layer]) -> float:
    """Of decomposing the factors, in cubes of their sizes."""
    inputs = {layer.input: layer for layer in reversed(group)}.values()
    work = sum(math.prod(x.stack) * x.in_features**3 for x in inputs if x.a_dense)
    work += sum(math.prod(x.stack) * x.out_features**3 for x in group if x.g_dense)
    return float(work)


def _part_of(factors: Factors, layers: tuple[Layer, ...]) -> Factors:
    """The factors of some layers, with all readers of their inputs."""
    if layers == factors.layers:
        return factors
    names = {layer.name for layer in layers}
    tables = {
        table: {k: x for k, x in getattr(factors, table).items() if k in names}
        for table in _FACTORS
    }
    return dataclasses.replace(factors, layers=layers, **tables)


def _tables(held: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(held) if isinstance(getattr(held, f.name), dict)]


def _like(held: Any, part: Any) -> Any:
    """What is held of the layers of a part."""
    tables = {
        table: {k: getattr(held, table)[k] for k in getattr(part, table)} for table in _tables(part)
    }
    return dataclasses.replace(part, **tables)


def _written(held: Any, part: Any) -> Any:
    """What is held, with that of a part in place of its own."""
    tables = {table: getattr(held, table) | getattr(part, table) for table in _tables(part)}
    return dataclasses.replace(held, **tables)
