"""What an option is."""

import dataclasses
from typing import Any

from jaxkfac.planning._program import TrainingProgram
from jaxkfac.planning._program_bytes import MemoryRows, MicroBatches, ProgramBytes


@dataclasses.dataclass(frozen=True)
class Choice:
    """What an option sees of the setting that it is a part of.

    Attributes:
        options: Names of all options of the setting.
        steps: Parts of the batch; 1 without accumulation.
        budget: ``max_factor_bytes``, where factors are gathered under one.
    """

    options: frozenset[str]
    steps: int
    budget: int | None


class Option:
    """One change. A method that is not overridden changes nothing.

    Attributes:
        name: As it is asked for.
        title: Of its column.
        needs: The option that it cannot do without; ``""`` is none.
        changes_program: Whether :meth:`program` is overridden.
        only_compiled: Whether its program is traced only where a compiler is asked; else
            :meth:`change` says what it would change.
        changes_factors: Whether factors have other shapes with it.
        changes_shapes: Whether anything but activations has, if it changes the program.
        shortens: Whether values have fewer bits, but no others are there.
        takes_factors: Whether factors leave the device, and are added up on the host.
        takes_bases: Whether eigenvectors are on the host.
        accumulator_dtype: Of sums over micro-batches, if it changes that.
        sharded: Whether it is planned where parameters are divided over devices, too.
    """

    name = title = needs = ""
    changes_program = changes_factors = only_compiled = shortens = False
    changes_shapes = True
    takes_factors = takes_bases = sharded = False
    accumulator_dtype: Any = None

    def needed(self, micro_batches: MicroBatches) -> str:
        """The option that it cannot do without in this training."""
        return self.needs

    def program(self, program: TrainingProgram, steps: int) -> TrainingProgram:
        """The program with this option.

        Raises:
            UnavailableError: it does not have it.
        """
        return program

    def check(self, of: ProgramBytes, choice: Choice) -> None:
        """Raise an ``UnavailableError`` where the optimizer or the curvature rules it out."""

    def temporaries(self, of: ProgramBytes, choice: Choice) -> int | None:
        """Temporaries of the program that runs, if it is not the one with all factors."""

    def change(self, rows: MemoryRows, of: ProgramBytes, choice: Choice) -> None:
        """Change the rows, which those of the options before it have changed."""

    def gradients(self, of: ProgramBytes, choice: Choice) -> float:
        """How many times the arithmetic of the step as it stands it takes."""
        return 1.0

    def cost(self, of: ProgramBytes, choice: Choice) -> str:
        """What it costs, in words."""
        raise NotImplementedError
