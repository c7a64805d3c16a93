"""Factors under a budget of bytes: several passes; each leaves the device before the next."""

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from jaxkfac._arguments import ArrayTree
from jaxkfac.blocks import Factors, Side, Sides
from jaxkfac.factors._collect import FactorCollector
from jaxkfac.factors._gather import Call, ValueGradAndFactors
from jaxkfac.factors._passes import (
    Pass,
    PassPlan,
    largest_budget,
    plan_passes,
    smallest_budget,
)
from jaxkfac.factors._scalar_loss import AdaptationOfBatch
from jaxkfac.factors._statistics import PassPart
from jaxkfac.interception import Layer
from jaxkfac.interception.values import Window
from jaxkfac.memory import whole_here


class _Key(NamedTuple):
    """Identifies the compiled program that a pass runs."""

    parts: tuple[tuple[str, PassPart], ...]
    gradient: bool | None  # None: the value without the gradient


class Budgets(NamedTuple):
    """Limits in bytes for the factors of a collection.

    Attributes:
        least: The smallest limit: the largest side of a layer, at one iteration.
        whole: The smallest limit under which a single pass suffices.
    """

    least: int
    whole: int


class PassResult(NamedTuple):
    """The result of one pass that computes no gradient.

    Attributes:
        value: As in ``ValueGradAndFactors``.
        factors: What the pass gathers, on the device. A stacked array has as many iterations as
            the window of the pass.
    """

    value: Any
    factors: Factors


class BudgetedCollector:
    """What ``value_grad_and_factors`` returns under ``max_factor_bytes``; do not jit it.

    In a single compiled program the factors of all passes could be alive at once. So this callable
    compiles its passes itself and fetches the factors of each before the next begins.
    """

    def __init__(
        self, collector: FactorCollector, max_factor_bytes: int, sink: tuple[Any, int] | None
    ) -> None:
        self._collector, self._budget, self._sink = collector, max_factor_bytes, sink
        self._programs: dict[_Key, Any] = {}
        self._gradient: Any = None  # jitted by the first step that collects no factors
        self._announced: set[str] = set()

    def __call__(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree = None,
        state: ArrayTree | None = None,
        *,
        step: int | None = None,
    ) -> ValueGradAndFactors:
        """Value, gradient and factors of one batch; see ``FactorCollector``.

        Args:
            params: Parameters.
            batch: The batch.
            key: For dropout and sampled labels; the same in every pass.
            positions: Which positions exist.
            labels: Labels in place of sampled ones.
            state: What a call changes; the same in every pass.
            step: The step number for ``every=``; it also replaces the sink's step.

        Returns:
            ``(value, grads, factors)``. The factors are NumPy arrays in host memory. With a
            sink they contain no layer, because each pass pushed its own.

        Raises:
            MemoryBudgetError: one side of one layer is larger than the budget.
            TypeError: called under ``jit``.
        """
        args = (params, batch, key, positions, labels, state)
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
            raise TypeError(
                "max_factor_bytes: the factors of one pass leave the device before the next "
                "begins, so this function compiles its passes itself: call it outside of jit"
            )
        plan = self.plan(*args)
        if str(plan) not in self._announced:
            print(f"jaxkfac: {plan}", file=sys.stderr)
            self._announced.add(str(plan))
        call = self._collector.checked(batch, key, positions, labels, state)
        if not self._collector.is_due(step):
            return self._without_factors(params, call)
        layers = self._collector.traced(params, call).table.layers
        value = grads = None
        assembly = _Assembly(layers)
        for number, one in enumerate(plan.passes):
            if number == 0:
                value, grads, factors = self._program(one, True)(params, call, one.start)
            else:
                factors = self._program(one, False)(params, call, one.start)
            pass_factors = _on_host(factors, one, layers)
            assembly.loss_terms = pass_factors.loss_terms
            if self._sink is None:
                assembly.add(pass_factors, one)
            else:
                service, at = self._sink
                service.push(pass_factors, at if step is None else step, first_iteration=one.start)
        return ValueGradAndFactors(value, grads, assembly.factors())

    @property
    def adaptation(self) -> Callable[..., AdaptationOfBatch]:
        """See ``FactorCollector``; it needs no factors, so the budget does not matter."""
        return self._collector.adaptation

    def under(self, max_factor_bytes: int) -> "BudgetedCollector":
        """A copy with another budget, which shares the traces."""
        rebudgeted = copy.copy(self)
        rebudgeted._budget = max_factor_bytes
        return rebudgeted

    def plan(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
        labels: ArrayTree = None,
        state: ArrayTree | None = None,
    ) -> PassPlan:
        """The passes for these shapes; nothing is computed."""
        call = self._collector.checked(batch, key, positions, labels, state)
        traced = self._collector.traced(params, call)
        # Those of this call: `labels=` may hold more samples than the collector would draw.
        vjps = call.estimator.concurrent
        return plan_passes(self._collector.statistics(traced), self._budget, vjps=vjps)

    def budgets(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
    ) -> Budgets:
        """The least budget, and the least budget of a single pass; nothing is computed."""
        traced = self._collector.traced(params, self._collector.checked(batch, key))
        statistics, vjps = self._collector.statistics(traced), self._collector.vjps
        least = smallest_budget(statistics, vjps=vjps)
        return Budgets(least, largest_budget(statistics, vjps=vjps))

    def call(
        self,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
        positions: Bool[Array, "..."] | Float[Array, "..."] | None = None,
    ) -> Call:
        """The arguments for a program of :meth:`pass_program`."""
        return self._collector.checked(batch, key, positions)

    def pass_program(self, one: Pass) -> Any:
        """One pass without the gradient, for a caller that runs each pass over many batches.

        Returns:
            A jitted ``(params, call, start) -> PassResult``, where ``call`` comes from :meth:`call`
            and ``start`` is ``one.start`` as an int32. Passes with equal ``parts`` share it.
        """
        program_key = _Key(tuple(one.parts.items()), None)
        if program_key not in self._programs:
            self._programs[program_key] = jax.jit(functools.partial(self._run, program_key))
        return self._programs[program_key]

    def lower(
        self,
        params: ArrayTree,
        batch: ArrayTree,
        key: Key[Array | jax.ShapeDtypeStruct, ""] | None = None,
    ) -> list[tuple[Pass, Any]]:
        """Each pass with its lowered program; ``.compile()`` it to read memory and cost."""
        plan = self.plan(params, batch, key)
        call = self._collector.checked(batch, key)
        return [
            (one, self._program(one, number == 0).lower(params, call, one.start))
            for number, one in enumerate(plan.passes)
        ]

    def factor_shapes(self, *args: Any, **kwargs: Any) -> Factors:
        """``Factors`` of ``jax.ShapeDtypeStruct``; nothing is computed."""
        return self._collector.factor_shapes(*args, **kwargs)

    def _without_factors(self, params: ArrayTree, call: Call) -> ValueGradAndFactors:
        """The gradient alone; factors are zeros in host memory, or empty with a sink."""
        if self._gradient is None:
            self._gradient = jax.jit(self._run_gradient)
        value, grads, loss_terms = self._gradient(params, call)
        if self._sink is not None:
            zeros = _Assembly(()).factors()
        else:
            like = self._collector.types(params, call)
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        factors = dataclasses.replace(zeros, loss_terms=np.array(loss_terms))
        return ValueGradAndFactors(value, grads, factors)

    def _run_gradient(self, params: ArrayTree, call: Call) -> tuple[ArrayTree, ArrayTree, Array]:
        value, grads, factors = self._collector.without_factors(params, call)
        return value, grads, factors.loss_terms

    def _program(self, one: Pass, gradient: bool) -> Any:
        """A jitted pass; windows of one size share it, because their start is an argument."""
        program_key = _Key(tuple(one.parts.items()), gradient)
        if program_key not in self._programs:
            self._programs[program_key] = jax.jit(functools.partial(self._run, program_key))
        return self._programs[program_key]

    def _run(
        self, what: _Key, params: ArrayTree, call: Call, at: Int[Array, ""]
    ) -> ValueGradAndFactors | PassResult | Factors:
        parts = dict(what.parts)
        windows = {
            name: Window(at, gathered.rows) for name, gathered in parts.items() if gathered.rows
        }
        out = self._collector.gather(
            params, call, parts=parts, windows=windows, gradient=bool(what.gradient)
        )
        if what.gradient is None:
            return PassResult(out.value, out.factors)
        return out if what.gradient else out.factors


def _on_host(factors: Factors, one: Pass, layers: Sequence[Layer]) -> Factors:
    """One pass's factors in host memory, without rows beyond the end of a scan."""
    layers_by_name = {layer.name: layer for layer in layers}
    fetched = jax.device_get(jax.tree.map(whole_here, factors))

    def copied(value: Any, name: str) -> np.ndarray:
        rows = layers_by_name[name].stack[0] - one.start if one.has_window_of(name) else None
        out = np.array(value[:rows] if value.ndim else value)
        out.flags.writeable = False  # a service may keep the array without a copy
        return out

    sides = {
        place: Side(copied(side.data, place.key), copied(side.count, place.key))
        for place, side in fetched.sides.items()
    }
    out = fetched.with_sides(
        sides,
        terms=np.array(fetched.terms),
        layers=tuple(layers_by_name.get(x.name) or x for x in fetched.layers),
        loss_terms=None if fetched.loss_terms is None else np.array(fetched.loss_terms),
        corrections=None,
        turn=None,
    )
    # Not left to the garbage collector: the next pass is sized for a device without these arrays.
    for leaf in jax.tree.leaves(factors):
        leaf.delete()
    return out


class _Assembly:
    """Assemble the factors that passes bring into one ``Factors``; empty if none came."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._order = [layer.name for layer in layers]
        self._layers: dict[str, Layer] = {}
        self._sides: Sides = {}
        self._fields: dict[str, Any] = {"terms": np.zeros(()), "bias": "joint", "origin": None}
        self.loss_terms: Any = None

    def add(self, pass_factors: Factors, one: Pass) -> None:
        """Put the factors of one pass in their place."""
        self._fields = {field: getattr(pass_factors, field) for field in self._fields}
        self._layers |= {layer.name: layer for layer in pass_factors.layers}
        for place, side in pass_factors.sides.items():
            if not one.has_window_of(place.key):
                self._sides[place] = side
                continue
            if place not in self._sides:
                length = self._layers[place.key].stack[0]
                self._sides[place] = side.map_stack(
                    lambda x, n=length: np.zeros((n, *x.shape[1:]), x.dtype)
                )

            def write(whole: np.ndarray, part: np.ndarray) -> None:
                whole[one.start : one.start + len(part)] = part

            self._sides[place].map_stack(write, side)

    def factors(self) -> Factors:
        """The assembled factors, with layers in the program's order."""
        order = sorted(self._layers, key=[*self._order, *self._layers].index)
        layers = tuple(self._layers[name] for name in order)
        return Factors.of_sides(
            self._sides, layers=layers, loss_terms=self.loss_terms, **self._fields
        )
