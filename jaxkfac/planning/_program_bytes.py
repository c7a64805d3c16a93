"""Memory of one program on the device, row by row, before any option changes a row."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import optax

from jaxkfac._arguments import partition
from jaxkfac.curvature.host import HostOptions
from jaxkfac.optim import MemoryKind, multi_steps
from jaxkfac.planning._curvature_bytes import CurvatureBytes
from jaxkfac.planning._program import TrainingProgram, first_line
from jaxkfac.planning._shapes import UnavailableError, nbytes
from jaxkfac.planning._step import (
    Step,
    exchanged,
    optimizer_state,
    step_needs,
    traced,
    update_alone,
    update_of,
    with_gradient,
)
from jaxkfac.planning._temporaries import Needs

Compiled = Literal["all", "gradient", "known", "none"]

# Rows that are never in memory together: temporaries of the gradient, a decomposition, the update.
IN_TURN = ("activations", "workspace", "update")
# Memory that libraries allocate themselves, by formula, since no compiler reports it.
SCRATCH = ("eigh scratch", "conv scratch")
ESTIMATED = (*IN_TURN, *SCRATCH)
_CLOSE = 1.02  # ratio up to which the peaks of two programs are the same arrays


def at_once(rows: Mapping[str, int]) -> dict[str, int]:
    """The rows that are in memory together: of the alternating rows, only the largest."""
    largest = max(IN_TURN, key=lambda row: rows.get(row, 0))
    return {row: size for row, size in rows.items() if row not in IN_TURN or row == largest}


class MemoryRows(NamedTuple):
    """Bytes by row."""

    device: dict[str, int]
    host: dict[str, int]

    @property
    def device_total(self) -> int:
        """Bytes on the device at once."""
        return sum(at_once(self.device).values())


@dataclasses.dataclass(frozen=True)
class CurvatureChoice:
    """How factors are used.

    Attributes:
        vectors: Whether eigenvectors return to the device for preconditioning.
        in_flight_bytes: As for ``HostCurvature``.
        rank: Rank for the option ``"low_rank"``.
        decay: Decay of the averages, as for ``HostCurvature``.
    """

    vectors: bool
    in_flight_bytes: int
    rank: int = 512
    decay: float = HostOptions.decay

    @property
    def host_options(self) -> HostOptions:
        """Options of the service."""
        return HostOptions(in_flight_bytes=self.in_flight_bytes, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """Accumulation of the training as it stands.

    Attributes:
        steps: Number of micro-batches per step, of which the batch is one.
        accumulator_dtype: As for :func:`jaxkfac.multi_steps`.
        memory_kind: ``accumulator_memory_kind``, as for :func:`jaxkfac.multi_steps`.
    """

    steps: int = 1
    accumulator_dtype: Any = None
    memory_kind: MemoryKind = "device"


class ProgramBytes:
    """The bytes of one program.

    Args:
        program: The program.
        tx: The optimizer of what it trains.
        curvature: How factors are used; ``None`` if none are gathered.
        micro_batches: Accumulation of the training as it stands.
        donate: Whether a step donates its parameters and optimizer state.
        updates: Cache of the needs of updates, for all programs that train the same.

    Attributes:
        program: As given.
        micro_batches: As given.
        optimizer: Memory of the optimizer.
        wants_vectors: Whether eigenvectors return to the device.
        basis_rank: Rank for the option ``"low_rank"``.
    """

    def __init__(
        self,
        program: TrainingProgram,
        tx: optax.GradientTransformation | None,
        curvature: CurvatureChoice | None,
        micro_batches: MicroBatches,
        *,
        donate: bool,
        updates: dict[Any, Needs | str],
    ) -> None:
        self.program = program
        try:
            self.optimizer = optimizer_state(tx, program.trained, program.placement.nbytes)
        except ValueError as error:
            if not program.adapted:
                raise
            reason = f"the optimizer was made for the parameters of the base: {first_line(error)}"
            raise UnavailableError(reason) from None
        self._tx, self._donate = tx, donate
        self._updates = updates
        self.not_traced = ""  # why the update's temporaries are not counted
        self.micro_batches = micro_batches
        self._steps: dict[int, Needs | None] = {}
        self._accumulators: dict[tuple[bool, Any], int] = {}
        self.basis_rank = 0 if curvature is None else curvature.rank
        self.wants_vectors = curvature is not None and curvature.vectors
        self._of = None if curvature is None else CurvatureBytes(program, curvature.host_options)

    def require_all_factors(self) -> None:
        """Refuse an option that takes the factors of all layers from one step.

        Raises:
            UnavailableError: factors come in turns.
        """
        if self.program.comes_in_turns:
            raise UnavailableError("factors come in turns (collect=)")

    def require_factors(self) -> CurvatureBytes:
        """The bytes of curvature.

        Raises:
            UnavailableError: no factors are gathered.
        """
        if self._of is None:
            raise UnavailableError("no factors are gathered")
        return self._of

    @property
    def smallest_budget(self) -> int:
        """The smallest possible ``max_factor_bytes``."""
        return 0 if self._of is None else self._of.smallest_budget

    @property
    def largest_budget(self) -> int:
        """The smallest ``max_factor_bytes`` with a single pass."""
        return 0 if self._of is None else self._of.largest_budget

    def accumulator_bytes(self, steps: int, *, gathered: bool, dtype: Any = None) -> int:
        """Bytes that ``multi_steps`` would allocate.

        Args:
            steps: Parts into which each micro-batch is divided.
            gathered: Whether factors are accumulated too.
            dtype: Accumulator dtype, instead of that of the training.
        """
        if steps * self.micro_batches.steps == 1:
            return 0
        key = (gathered and self._of is not None, dtype or self.micro_batches.accumulator_dtype)
        if key not in self._accumulators:
            tx = multi_steps(
                optax.identity(),
                2,
                like=self.program.averages if key[0] else None,
                accumulator_dtype=key[1],
                accumulator_memory_kind=self.micro_batches.memory_kind,
            )
            state = jax.eval_shape(tx.init, self.program.trained)
            self._accumulators[key] = self.program.placement.nbytes(state.accumulation.acc_grads)
        return self._accumulators[key]

    def rows(self, activations: int, accumulators: int, update: int) -> MemoryRows:
        """Bytes of every row of the program as it stands.

        Args:
            activations: Temporaries of the gradient's program.
            accumulators: Bytes of sums over micro-batches.
            update: Temporaries of the update's program.
        """
        program, optimizer, of = self.program, self.optimizer, self._of
        trained = program.placement.nbytes
        on_host = accumulators if self.micro_batches.memory_kind == "pinned_host" else 0
        device = {
            "parameters": trained(program.trained) + nbytes(program.frozen),
            "gradients": trained(partition(program.trained)[0]),
            "optimizer": optimizer.nbytes,
            "accumulation": optimizer.accumulators + accumulators - on_host,
            "batch": nbytes(program.batch) - nbytes(program.frozen),
            "state": nbytes(program.state),
            "activations": activations,
            "update": update + self.undonated,
            "conv scratch": program.convolution_scratch,
        }
        if of is not None:
            device["factors"] = of.factors + optimizer.averages
            wanted = of.bases if self.wants_vectors else of.values
            device["bases"] = optimizer.bases or wanted
            # An update that decomposes writes its bases in place, one matrix after the other.
            device["workspace"] = of.workspace()
            device["eigh scratch"] = of.solver_scratch()
        return MemoryRows(device, {"accumulation": on_host} if on_host else {})

    @property
    def undonated(self) -> int:
        """Bytes of new parameters and state, if they do not reuse the memory of the old."""
        program = self.program
        if self._donate:
            return 0
        state = program.placement.nbytes((program.trained, self.optimizer.state))
        return state + nbytes(program.state)

    def is_one_program(self, steps: int) -> bool:
        """Whether gradient and update can form one program: nothing happens between them."""
        between = self._of is not None and not self.optimizer.bases
        return not between and (steps == 1 or self.micro_batches.memory_kind == "device")

    def step_needs(self, steps: int) -> Needs | None:
        """Memory needs of gradient and update in one program, ``None`` if they are not one.

        Args:
            steps: Micro-batches per step, which the update sums.
        """
        if steps not in self._steps:
            self._steps[steps] = self._whole_step(steps) if self.is_one_program(steps) else None
        return self._steps[steps]

    def _whole_step(self, steps: int) -> Needs | None:
        step = self._step(steps)
        if step is None:
            return None
        return self._counted(step_needs(self.program, step, donate=self._donate))

    def _step(self, steps: int, *, given_gradients: bool = False) -> Step | None:
        """Gradient and update in one program, ``None`` without an optimizer.

        Args:
            steps: Micro-batches per step, which the update sums.
            given_gradients: Whether gradients and factors are arguments, of the update alone.
        """
        tx, state, gathered = self._tx, self.optimizer.state, self._of is not None
        if steps > 1:
            like = self.program.averages if gathered else None
            dtype = self.micro_batches.accumulator_dtype
            inner = optax.identity() if tx is None else tx
            tx = multi_steps(inner, steps, like=like, accumulator_dtype=dtype)
            state = jax.eval_shape(tx.init, self.program.trained)
        if tx is None:
            return None
        update = update_of(self.program, tx, state, factors=gathered, accumulates=steps > 1)
        return update if given_gradients else with_gradient(update, self.program, factors=gathered)

    def exchanged(self, steps: int, *, in_one_program: bool) -> Mapping[str, int]:
        """Bytes that devices exchange in a step, if each has a batch of this size.

        Args:
            steps: Micro-batches per step.
            in_one_program: Whether gradient and update can form one program.
        """
        if self.program.placement.mesh is not None:
            return self._compiled_exchange(steps, in_one_program=in_one_program)
        step = self._step(steps) if in_one_program and self.is_one_program(steps) else None
        step_jaxpr = None
        if step is not None:
            step_jaxpr = traced(lambda: jax.make_jaxpr(step.fn)(*step.args))
        statistics = None if self._of is None else self._of.statistics
        jaxpr = None if isinstance(step_jaxpr, str) else step_jaxpr
        platform = self.program.temporaries.platform
        return exchanged(self.program, statistics, jaxpr, micro_batches=steps, platform=platform)

    def _compiled_exchange(self, steps: int, *, in_one_program: bool) -> Mapping[str, int]:
        """Exchanged bytes for sharded parameters, by kind of collective; empty if not compiled."""
        if not self.program.temporaries.compiled:
            return {}
        step = self.step_needs(steps) if in_one_program else None
        last = self._update_needs(bases=self.preconditions) if step is None else step
        sent = collections.Counter(last.collectives if last else {})
        times = steps - (step is not None)  # the last micro-batch and the update are one program
        for kind, size in self._gradient_needs("all").collectives.items() if times else ():
            sent[kind] += times * size
        return dict(sent)

    def _counted(self, needs: Needs | str) -> Needs | None:
        if isinstance(needs, str):
            self.not_traced = self.not_traced or needs
            return None
        return needs

    def in_one_program(self, rows: MemoryRows, steps: int) -> None:
        """Change the rows to those of a step that is one program.

        In one program, a compiler lets values die earlier: a used gradient, an overwritten
        parameter. The program's temporaries are attributed to gradients and factors first. The
        remainder is activations, unless the update alone needs as much: then the peak is there, and
        recomputation would not lower it.
        """
        needs, device = self.step_needs(steps), rows.device
        if needs is None:
            return
        temporaries = needs.temporaries
        device["gradients"] = min(device["gradients"], temporaries)
        temporaries -= device["gradients"]
        if self._of is not None:
            one = min(self._of.factors, temporaries)
            device["factors"] = self.optimizer.averages + one
            temporaries -= one
            device["workspace"] = 0
        device["activations"], device["update"] = temporaries, 0
        gradient = self._peak_of_update(steps, needs.temporaries, beyond=temporaries)
        if gradient is not None:
            device["activations"], device["update"] = gradient, temporaries
        if self.undonated:
            device["undonated"] = self.undonated + device["accumulation"] * (steps > 1)

    def _peak_of_update(self, steps: int, of_step: int, beyond: int) -> int | None:
        """Temporaries of the gradient alone if a step in one program has its peak in the update.

        Gradient and update are counted. Where the step was compiled they are scaled like it, which
        saves two compilations.

        Args:
            steps: Micro-batches per step.
            of_step: Temporaries of the step.
            beyond: Those of them that are neither gradients nor factors.
        """
        program, donated = self.program, (0, 1) * self._donate
        count = dataclasses.replace(program.temporaries, compiled=False)

        def counted(one: Step | None) -> int:
            assert one is not None  # the step was measured
            return count(one.fn, *one.args, donate_argnums=donated).temporaries

        if program.temporaries.compiled:
            scale = of_step / max(counted(self._step(steps)), 1)
            run = program.gradient if self._of is None else program.collect
            gradient = round(scale * count(run, *program.arguments).temporaries)
        else:
            scale, gradient = 1.0, self._gradient_needs("all").temporaries
        if beyond <= _CLOSE * gradient:
            return None
        update = scale * counted(self._step(steps, given_gradients=True))
        return gradient if beyond <= _CLOSE * update else None

    def bound_of_one_program(self, rows: MemoryRows) -> None:
        """Change the rows to a lower bound of :meth:`in_one_program`, without temporaries."""
        averages = self.optimizer.averages if self._of is not None else 0
        bound = {"gradients": 0, "factors": averages, "workspace": 0, "activations": 0}
        rows.device.update({row: bound[row] for row in rows.device.keys() & bound})

    def update_temporaries(self, *, bases: bool) -> int:
        """Temporaries of the update's program.

        Args:
            bases: Whether it preconditions with bases on the device.
        """
        needs = self._update_needs(bases=bases)
        return 0 if needs is None else needs.temporaries

    def _update_needs(self, *, bases: bool) -> Needs | None:
        key = (id(self.program.trained), bases)
        if key not in self._updates:
            bases_shapes = self._of.shapes_of_bases if bases and self._of is not None else None
            self._updates[key] = update_alone(
                self.program,
                self._tx,
                self.optimizer.state,
                bases=bases_shapes,
                donate=self._donate,
            )
        return self._counted(self._updates[key])

    @property
    def preconditions(self) -> bool:
        """Whether the update uses bases."""
        return self.wants_vectors and not self.optimizer.bases

    @property
    def main_temporaries(self) -> int:
        """Temporaries of the program that computes the gradient."""
        step = self.step_needs(self.micro_batches.steps)
        return self.temporaries("all") if step is None else step.temporaries

    def temporaries(self, compiled: Compiled) -> int:
        """Temporaries of the program as it stands; see :meth:`Setting.rows`."""
        if compiled == "none":
            return 0
        if compiled == "known":
            return self.program.known_temporaries
        return self._gradient_needs(compiled).temporaries

    def _gradient_needs(self, compiled: Compiled) -> Needs:
        gathers = self._of is not None and compiled == "all"
        return self.program.factor_needs if gathers else self.program.gradient_needs
