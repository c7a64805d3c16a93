"""Bytes of factors, bases and decompositions, on the device and on the host."""

import collections
import functools
import math
from typing import Any

import jax

from jaxkfac.curvature import Eigenbases, identity_bases
from jaxkfac.curvature.host._layout import Entry, Layout
from jaxkfac.factors._passes import PassPlan, largest_budget, plan_passes, smallest_budget
from jaxkfac.planning._shapes import nbytes
from jaxkfac.planning._variant import Variant

# syevd, on LAPACK and on cuSOLVER: the matrix that it overwrites and about 2 n^2 of scratch.
_WORKSPACE_MATRICES = 3
# HostCurvature's own bound: a worker holds the mean as well, and one matrix is being folded.
_HOST_MATRICES = 5


class CurvatureBytes:
    """Bytes of the curvature of one program.

    Args:
        variant: The program.
        in_flight_bytes: Of ``HostCurvature``.
    """

    def __init__(self, variant: Variant, in_flight_bytes: int) -> None:
        self._variant, self._in_flight_bytes = variant, in_flight_bytes
        self._compiled: dict[Any, int] = {}
        self._plans: dict[int, PassPlan] = {}

    @functools.cached_property
    def factors(self) -> int:
        """All factors of one step, with their counts."""
        return nbytes(self._variant.factors)

    @property
    def bases(self) -> int:
        """Eigenvalues and eigenvectors of all factors."""
        return nbytes(self._bases)

    @property
    def values(self) -> int:
        """Eigenvalues alone."""
        tables = (self._bases.a, self._bases.a_without_ones, self._bases.g)
        values = [spectrum.values for table in tables for spectrum in table.values()]
        return nbytes([values, self._bases.diagonals])

    def workspace(self, *, together: bool = False, from_host: bool = False) -> int:
        """Scratch of a decomposition on the device.

        Args:
            together: All matrices of one size in one call, as inside ``jit``; else one.
            from_host: The matrix itself is not among the factors on the device.
        """
        count: dict[int, int] = collections.Counter()
        for block in self._layout.blocks.values():
            if block.source.dense:
                count[block.size] += math.prod(block.source.stack)
        matrices = [n**2 * (number if together else 1) for n, number in count.items()]
        return (_WORKSPACE_MATRICES + from_host) * self._itemsize * max(matrices, default=0)

    @property
    def in_flight(self) -> int:
        """Pushed and not yet averaged; an array larger than what may be goes alone."""
        most = max(self._in_flight_bytes, *self._whole.values(), 0)
        return min(most, sum(self._whole.values()))

    @property
    def on_host(self) -> dict[str, int]:
        """The rows of ``HostCurvature``: what it refuses a smaller ``host_bytes`` for."""
        entries = self._layout.entries.values()
        folded = self._itemsize * sum(entry.elements for entry in entries)
        largest = max((entry.size for entry in entries if entry.dense), default=0)
        return {
            "averages": folded,
            "snapshots": folded,
            "bases in work": sum(n for entry, n in self._whole.items() if entry.dense),
            "workspace": _HOST_MATRICES * self._itemsize * largest**2,
            "in flight": self.in_flight,
        }

    @functools.cached_property
    def smallest_budget(self) -> int:
        """The least ``max_factor_bytes``."""
        return smallest_budget(self._statistics, vjps=self._variant.collector.vjps)

    @functools.cached_property
    def largest_budget(self) -> int:
        """The least ``max_factor_bytes`` under which there is one pass: more changes nothing."""
        return largest_budget(self._statistics, vjps=self._variant.collector.vjps)

    def first_pass_temporaries(self, budget: int) -> int:
        """Bytes beside arguments and results of the pass that also has the gradient."""
        first = self.passes(budget).passes[0]
        known = (tuple(first.parts.items()), first.start)
        if known not in self._compiled:
            self._compiled[known] = self._variant.pass_temporaries(first)
        return self._compiled[known]

    def passes(self, budget: int) -> PassPlan:
        """The passes under a budget."""
        if budget not in self._plans:
            vjps = self._variant.collector.vjps
            self._plans[budget] = plan_passes(self._statistics, budget, vjps=vjps)
        return self._plans[budget]

    @functools.cached_property
    def _statistics(self) -> Any:
        variant, collector = self._variant, self._variant.collector
        key = jax.eval_shape(lambda: jax.random.key(0))  # of the labels, and the model's if any
        call = collector.checked(variant.batch, key)
        return collector.statistics(collector.traced(variant.trained, call))

    @functools.cached_property
    def _bases(self) -> Eigenbases:
        return jax.eval_shape(identity_bases, self._variant.factors)

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(self._variant.factors.layers, self._variant.factors.bias)

    @functools.cached_property
    def _whole(self) -> dict[Entry, int]:
        """Bytes of every array; the diagonal counts twice, as in ``HostCurvature``."""
        entries = self._layout.entries.values()
        return {e: self._itemsize * (2 if e.dense else 1) * e.elements for e in entries}

    @property
    def _itemsize(self) -> int:
        leaves = jax.tree.leaves(self._variant.factors)
        return max((x.dtype.itemsize for x in leaves), default=4)
