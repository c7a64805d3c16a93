"""What one program holds on the device, row by row, before any option changes a row."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import optax

from jaxkfac.interception._paths import leaves_by_path
from jaxkfac.planning._curvature_bytes import CurvatureBytes
from jaxkfac.planning._optimizer import optimizer_state
from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._shapes import UnavailableError, differentiable, nbytes

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


class ProgramBytes:
    """The bytes of one program.

    Args:
        program: The program.
        tx: The optimizer of what it trains.
        curvature: ``None`` where no factors are gathered.

    Attributes:
        program: As given.
        optimizer: What the optimizer holds.
        wants_vectors: Whether eigenvectors come back to the device.
    """

    def __init__(
        self,
        program: TrainingProgram,
        tx: optax.GradientTransformation | None,
        curvature: Curvature | None,
    ) -> None:
        self.program, self.optimizer = program, optimizer_state(tx, program.trained)
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

    def rows(self, activations: int) -> MemoryRows:
        """Bytes of every row as the program stands, around its activations."""
        program, optimizer, of = self.program, self.optimizer, self._of
        device = {
            "parameters": nbytes(program.trained) + nbytes(program.frozen),
            "gradients": nbytes(differentiable(program.trained)),
            "optimizer": optimizer.nbytes,
            "accumulation": 0,
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
        return MemoryRows(device, {})

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
