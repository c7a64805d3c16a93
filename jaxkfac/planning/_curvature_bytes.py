"""Bytes of factors, bases and decompositions, on the device and on the host."""

import collections
import functools
import math
from typing import Any

import jax

from jaxkfac.curvature import Eigenbases, identity_bases, solver_scratch
from jaxkfac.curvature.host import HostBytes, HostOptions, service_bytes, widening_bytes
from jaxkfac.factors import Pass, PassPlan, largest_budget, plan_passes, smallest_budget
from jaxkfac.linalg.spectral import Spectrum
from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._shapes import nbytes

# Optional memory of a service, dropped if there is no room.
WIDENING = "averages in float64"


class CurvatureBytes:
    """Bytes of a program's curvature.

    Args:
        program: The program.
        options: Options of ``HostCurvature``.
    """

    def __init__(self, program: TrainingProgram, options: HostOptions) -> None:
        self._program, self._options = program, options
        self._compiled: dict[Any, int] = {}
        self._plans: dict[int, PassPlan] = {}

    @functools.cached_property
    def factors(self) -> int:
        """Bytes of the factors of one step, with their counts: of all layers, or of one group."""
        return self._program.placement.nbytes(self._program.factors)

    @property
    def bases(self) -> int:
        """Bytes of eigenvalues and eigenvectors of all factors."""
        return self._program.placement.nbytes(self._bases)

    @property
    def values(self) -> int:
        """Bytes of the eigenvalues alone."""
        values = [spectrum.values for spectrum in self._spectra]
        return self._program.placement.nbytes([values, self._bases.diagonals])

    def workspace(self, *, from_host: bool = False) -> int:
        """Bytes of the matrix that a decomposition on the device overwrites, without its scratch.

        Args:
            from_host: Whether the matrix itself is not among the factors on the device.
        """
        return (1 + from_host) * self._itemsize * self.largest_side**2

    def solver_scratch(self) -> int:
        """Bytes that syevd allocates itself, in LAPACK or cuSOLVER, for the largest matrix."""
        return solver_scratch(self.largest_side, 1, self._itemsize) if self.largest_side else 0

    @property
    def _itemsize(self) -> int:
        return max((x.dtype.itemsize for x in jax.tree.leaves(self._program.factors)), default=4)

    @property
    def largest_bases(self) -> int:
        """Bytes of the eigenvectors of one block; for a scanned layer, of one iteration."""
        sizes = [
            sum(nbytes(x.vectors) // math.prod(x.vectors.shape[:-2]) for x in pair if x.vectors)
            for pair in self._pairs
        ]
        return max(sizes, default=0)

    @property
    def largest_block(self) -> int:
        """Bytes of the matrix of one block; for a scanned layer, of one iteration."""
        sizes = [
            a.values.shape[-1] * g.values.shape[-1] * a.values.dtype.itemsize
            for a, g in self._pairs
        ]
        return max(sizes, default=0)

    @property
    def _pairs(self) -> list[tuple[Spectrum, Spectrum]]:
        bases = self._bases
        return [bases.spectra(layer) for layer in bases.layers if not layer.is_diagonal]

    @property
    def shapes_of_bases(self) -> Eigenbases:
        """Shapes of all bases."""
        return self._bases

    def bases_on_host(self, options: HostOptions) -> int:
        """Bytes of the eigenvectors that a service keeps on the host."""
        return service_bytes(self._program.factors, options).bases

    def bases_kept(self, options: HostOptions) -> int:
        """Bytes of all eigenvalues, and of eigenvectors in the dtype and rank that are kept."""
        total = self.values
        for spectrum in self._spectra:
            if (vectors := spectrum.vectors) is not None:
                side = vectors.shape[-1]
                columns = nbytes(vectors) // side * min(options.rank or side, side)
                half = options.vectors_dtype == "bfloat16"
                total += columns * 2 // vectors.dtype.itemsize if half else columns
        return total

    @property
    def largest_side(self) -> int:
        """Rows of the largest matrix."""
        sides = (s.vectors.shape[-1] for s in self._spectra if s.vectors is not None)
        return max(sides, default=0)

    @property
    def in_flight(self) -> int:
        """Bytes of factors that are pushed and not yet averaged."""
        return self._service.in_flight

    def on_host(self, steps: int, budget: int | None) -> dict[str, int]:
        """The host rows of ``HostCurvature``.

        Args:
            steps: Micro-batches per step, each pushed separately.
            budget: Budget under which factors are gathered in passes, each pushed separately; 0 or
                ``None`` means one pass.
        """
        rows = {row.replace("_", " "): size for row, size in self._service._asdict().items()}
        rows[WIDENING] = widening_bytes(
            self._program.factors, self._options, contributions=steps * self._most_passes(budget)
        )
        return {row: size for row, size in rows.items() if size}

    @functools.cached_property
    def _service(self) -> HostBytes:
        return service_bytes(self._program.factors, self._options)

    def _most_passes(self, budget: int | None) -> int:
        """Largest number of passes that gather one side of one layer, each some iterations."""
        if not budget:
            return 1
        count: dict[Any, int] = collections.Counter(
            (name, inputs)
            for one in self.passes(budget).passes
            for name, layer_part in one.parts.items()
            for inputs, is_gathered in ((True, layer_part.inputs), (False, layer_part.outputs))
            if is_gathered
        )
        return max(count.values(), default=1)

    @functools.cached_property
    def smallest_budget(self) -> int:
        """The smallest possible ``max_factor_bytes``."""
        return smallest_budget(self.statistics, vjps=self._program.collector.vjps)

    @functools.cached_property
    def largest_budget(self) -> int:
        """The smallest ``max_factor_bytes`` with a single pass; a larger one changes nothing."""
        return largest_budget(self.statistics, vjps=self._program.collector.vjps)

    def most_pass_temporaries(self, budget: int) -> int:
        """Temporaries of the pass that also computes the gradient, or of a larger one if more."""
        passes = self.passes(budget).passes
        largest = max(passes, key=lambda one: one.nbytes)  # the first of several
        return max(map(self._temporaries_of, (passes[0], largest)))

    def most_pass_results(self, budget: int) -> int:
        """Bytes of the factors that the largest pass returns, which may be a later one."""
        return max(one.results for one in self.passes(budget).passes)

    def _temporaries_of(self, one: Pass) -> int:
        key = (tuple(one.parts.items()), one.start)
        if key not in self._compiled:
            self._compiled[key] = self._program.pass_temporaries(one)
        return self._compiled[key]

    def passes(self, budget: int) -> PassPlan:
        """The passes under a budget."""
        if budget not in self._plans:
            vjps = self._program.collector.vjps
            self._plans[budget] = plan_passes(self.statistics, budget, vjps=vjps)
        return self._plans[budget]

    @functools.cached_property
    def statistics(self) -> Any:
        """The statistics that a step gathers."""
        program, collector = self._program, self._program.collector
        extra = program.extra  # its key serves for sampled labels and for the model's draws
        call = collector.checked(program.batch, extra.key, state=extra.state)
        return collector.statistics_of_step(collector.traced(program.trained, call))

    @functools.cached_property
    def _bases(self) -> Eigenbases:
        return jax.eval_shape(identity_bases, self._program.averages)

    @property
    def _spectra(self) -> list[Spectrum]:
        data = [side.data for side in self._bases.sides.values()]
        return [x for x in data if isinstance(x, Spectrum)]
