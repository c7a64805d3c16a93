"""The interface of an option, and the options about a host service's eigenvectors."""

import dataclasses
from typing import Any

from jaxkfac.curvature.host import HostOptions
from jaxkfac.memory import bytes_text
from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._program_bytes import MemoryRows, MicroBatches, ProgramBytes
from jaxkfac.planning._shapes import UnavailableError


@dataclasses.dataclass(frozen=True)
class Choice:
    """The setting around an option, as the option sees it.

    Attributes:
        options: Names of all options of the setting.
        steps: Number of parts of the batch; 1 without accumulation.
        budget: ``max_factor_bytes``, if factors are gathered under a budget.
    """

    options: frozenset[str]
    steps: int
    budget: int | None


class Option:
    """One change to a training. Methods that are not overridden change nothing.

    Attributes:
        name: Name in ``options=``.
        title: Heading of its column.
        needs: Name of the option that it requires; ``""`` for none.
        changes_program: Whether :meth:`program` is overridden.
        only_compiled: Whether its program is traced only where a compiler is used; otherwise
            :meth:`change` states what it would change.
        changes_factors: Whether it changes the shapes of factors.
        changes_shapes: For options that change the program, whether more than activations change.
        shortens: Whether it only reduces the bits of values.
        takes_factors: Whether factors leave the device and are summed on the host.
        takes_bases: Whether eigenvectors are on the host.
        accumulator_dtype: Dtype of sums over micro-batches, if it changes that.
        sharded: Whether it is also planned for sharded parameters.
    """

    name = title = needs = ""
    changes_program = changes_factors = only_compiled = shortens = False
    changes_shapes = True
    takes_factors = takes_bases = sharded = False
    accumulator_dtype: Any = None

    def needed(self, micro_batches: MicroBatches) -> str:
        """The option that this one requires in this training."""
        return self.needs

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        """The program with this option applied.

        Raises:
            UnavailableError: the option does not apply to the program.
        """
        return program

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        """Raise an ``UnavailableError`` if the optimizer or the curvature rules the option out."""

    def temporaries(self, of: ProgramBytes, choice: Choice) -> int | None:
        """Temporaries of the program that runs, if that is not the one with all factors."""

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        """Change the rows, on top of the changes of earlier options."""

    def gradients(self, of: ProgramBytes, choice: Choice) -> float:
        """The arithmetic of a step, relative to that of the training as it stands."""
        return 1.0

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        """Description of its cost."""
        raise NotImplementedError


# ---------------- eigenvectors of ``HostCurvature``: fewer bits, fewer vectors, or on the host


class HalfBases(Option):
    """Eigenvectors in bfloat16."""

    name, title, needs = "half_bases", "bf16-b.", "host"

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        rows.device["bases"] = of.require_factors().bases_kept(_host_options(of, choice))

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return 'HostCurvature(vectors_dtype="bfloat16"): elements of eigenvectors are off by 0.2 %'


class LowRank(Option):
    """The leading eigenvectors of each factor."""

    name, title, needs = "low_rank", "low-rank", "host"

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)
        if of.require_factors().largest_side <= of.basis_rank:
            raise UnavailableError(f"no factor has more than {of.basis_rank} rows")

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        if HostBases.name not in choice.options:
            rows.device["bases"] = of.require_factors().bases_kept(_host_options(of, choice))

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        return (
            f"HostCurvature(rank={of.basis_rank}): other directions have their mean eigenvalue; "
            "rank_errors of the service gives the error"
        )


class HostBases(Option):
    """Eigenvectors in host memory, with one layer's at a time on the device."""

    name, title, needs, takes_bases = "host_bases", "host-b.", "host", True

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        _require_bases(of)

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        curvature = of.require_factors()
        rows.host["bases"] = curvature.bases_on_host(_host_options(of, choice))
        # Eigenvectors of one block and of the next, which is being moved, and four matrices.
        rows.device["bases"] = 2 * curvature.largest_bases
        rows.device["update"] += 4 * curvature.largest_block

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        moved = bytes_text(of.require_factors().bases_kept(_host_options(of, choice)))
        return f'HostCurvature(bases_in="host"): {moved} of bases cross to the device at every step'


def _host_options(of: ProgramBytes, choice: Choice) -> HostOptions:
    """Options about the eigenvectors that a service keeps."""
    return HostOptions(
        bases_in="host",
        vectors_dtype="bfloat16" if HalfBases.name in choice.options else None,
        rank=of.basis_rank if LowRank.name in choice.options else None,
    )


def _require_bases(of: ProgramBytes) -> None:
    of.require_factors()
    if not of.preconditions:
        raise UnavailableError("no eigenvectors come back to the device")
