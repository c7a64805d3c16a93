"""What one program holds on the device, row by row, before any option changes a row."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import optax

from jaxkfac.interception import leaves_by_path, partition
from jaxkfac.optim import MemoryKind, multi_steps
from jaxkfac.planning._curvature_bytes import CurvatureBytes
from jaxkfac.planning._optimizer import optimizer_state
from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._shapes import UnavailableError, nbytes

Compiled = Literal["all", "gradient", "none"]

ESTIMATED = ("activations", "workspace")


class MemoryRows(NamedTuple):
    """Bytes by row."""

    device: dict[str, int]
    host: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Curvature:
    """What is done with factors.

    Attributes:
        vectors: Whether eigenvectors come back to the device, to precondition with.
        in_flight_bytes: Of ``HostCurvature``.
    """

    vectors: bool
    in_flight_bytes: int


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """How the training as it stands accumulates.

    Attributes:
        steps: Of how many micro-batches a step the batch is one.
        accumulator_dtype: Of :func:`jaxkfac.multi_steps`.
        memory_kind: Likewise, ``accumulator_memory_kind``.
    """

    steps: int = 1
    accumulator_dtype: Any = None
    memory_kind: MemoryKind = "device"


class ProgramBytes:
    """The bytes of one program.

    Args:
        program: The program.
        tx: The optimizer of what it trains.
        curvature: ``None`` where no factors are gathered.
        micro_batches: Of the training as it stands.

    Attributes:
        program: As given.
        micro_batches: As given.
        optimizer: What the optimizer holds.
        wants_vectors: Whether eigenvectors come back to the device.
    """

    def __init__(
        self,
        program: TrainingProgram,
        tx: optax.GradientTransformation | None,
        curvature: Curvature | None,
        micro_batches: MicroBatches,
    ) -> None:
        self.program, self.optimizer = program, optimizer_state(tx, program.trained)
        self.micro_batches = micro_batches
        self._accumulators: dict[tuple[bool, Any], int] = {}
        self.wants_vectors = curvature is not None and curvature.vectors
        self._of = None if curvature is None else CurvatureBytes(program, curvature.in_flight_bytes)

    def require_factors(self) -> CurvatureBytes:
        """The bytes of curvature.

        Raises:
            UnavailableError: no factors are gathered.
        """
        if self._of is None:
            raise UnavailableError("no factors are gathered")
        return self._of

    @property
    def factor_bytes(self) -> int:
        """Of all factors of one step."""
        return 0 if self._of is None else self._of.factors

    @property
    def smallest_budget(self) -> int:
        """The least ``max_factor_bytes``."""
        return 0 if self._of is None else self._of.smallest_budget

    @property
    def largest_budget(self) -> int:
        """The least ``max_factor_bytes`` under which there is one pass."""
        return 0 if self._of is None else self._of.largest_budget

    def accumulator_bytes(self, steps: int, *, gathered: bool, dtype: Any = None) -> int:
        """What ``multi_steps`` would allocate.

        Args:
            steps: Parts that each micro-batch is cut into.
            gathered: Whether factors are accumulated, too.
            dtype: In place of the training's own.
        """
        if steps * self.micro_batches.steps == 1:
            return 0
        known = (gathered and self._of is not None, dtype or self.micro_batches.accumulator_dtype)
        if known not in self._accumulators:
            tx = multi_steps(
                optax.identity(),
                2,
                like=self.program.factors if known[0] else None,
                accumulator_dtype=known[1],
                accumulator_memory_kind=self.micro_batches.memory_kind,
            )
            state = jax.eval_shape(tx.init, self.program.trained)
            self._accumulators[known] = nbytes(state.accumulation.acc_grads)
        return self._accumulators[known]

    def rows(self, activations: int, accumulators: int) -> MemoryRows:
        """Bytes of every row as the program stands, around its activations and accumulators."""
        program, optimizer, of = self.program, self.optimizer, self._of
        on_host = accumulators if self.micro_batches.memory_kind == "pinned_host" else 0
        device = {
            "parameters": nbytes(program.trained) + nbytes(program.frozen),
            "gradients": nbytes(partition(program.trained)[0]),
            "optimizer": optimizer.nbytes,
            "accumulation": optimizer.accumulators + accumulators - on_host,
            "batch": nbytes(program.batch) - nbytes(program.frozen),
            "activations": activations,
        }
        if of is not None:
            device["factors"] = of.factors * (1 + optimizer.averages)
            if optimizer.bases:  # the update decomposes: the new bases beside the old
                device["bases"] = of.bases
                device["workspace"] = of.workspace(together=True) + of.bases
            else:
                device["bases"] = of.bases if self.wants_vectors else of.values
                device["workspace"] = of.workspace()
        return MemoryRows(device, {"accumulation": on_host} if on_host else {})

    def temporaries(self, compiled: Compiled) -> int:
        """Temporaries of the program that runs as it stands; see :meth:`Setting.rows`."""
        if compiled == "none":
            return 0
        if self._of is None or compiled == "gradient":
            return self.program.gradient_temporaries
        return self.program.factor_temporaries

    def itemsize(self, path: str) -> int:
        """Bytes of an element of a frozen parameter."""
        return self._frozen_leaves[path].dtype.itemsize

    @functools.cached_property
    def _frozen_leaves(self) -> dict[str, Any]:
        return leaves_by_path(self.program.frozen)
