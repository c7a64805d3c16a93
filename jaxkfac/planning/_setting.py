"""A set of options: its program, its rows, and its cost."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxkfac import lslora
from jaxkfac._arguments import ArrayTree, partition
from jaxkfac.factors import Objective, takes_key
from jaxkfac.interception import jaxpr_of, marks_of
from jaxkfac.planning._option import Choice, Option
from jaxkfac.planning._options import ordered
from jaxkfac.planning._program import TrainingProgram, check_traces, shape_of_key
from jaxkfac.planning._program_bytes import Compiled, MemoryRows, ProgramBytes
from jaxkfac.planning._shapes import WHOLE, Placement, UnavailableError
from jaxkfac.planning._temporaries import Temporaries


@dataclasses.dataclass(frozen=True)
class Setting:
    """A set of options; hashable.

    Attributes:
        options: Names of the options.
        steps: Number of parts of the batch; 1 unless ``"accumulation"`` is among the options.
    """

    options: frozenset[str] = frozenset()
    steps: int = 1

    def __contains__(self, name: object) -> bool:
        return name in self.options

    @property
    def ordered(self) -> list[Option]:
        """The options, cheapest first."""
        return ordered(self.options)

    @property
    def of_program(self) -> "Setting":
        """The options that change the program; the place of factors and weights does not."""
        return self.only(lambda option: option.changes_program)

    @property
    def of_factors(self) -> "Setting":
        """The options that change the shapes of factors."""
        return Setting(frozenset(option.name for option in self.ordered if option.changes_factors))

    @property
    def of_shapes(self) -> "Setting":
        """The setting without the options that change only activations."""
        return self.only(lambda option: option.changes_shapes)

    @property
    def of_more_bits(self) -> "Setting":
        """The setting without the options that reduce bits."""
        return self.only(lambda option: not option.shortens)

    def only(self, wanted: Callable[[Option], bool]) -> "Setting":
        """The setting with the options that are wanted."""
        return Setting(frozenset(x.name for x in self.ordered if wanted(x)), self.steps)

    def program(self, plain: TrainingProgram) -> TrainingProgram:
        """The program with these options applied.

        Raises:
            UnavailableError: an option does not apply to it.
        """
        program = plain
        for option in self.ordered:
            program = option.program(program, self.steps)
        return program

    def rows(
        self, of: ProgramBytes, budget: int | None, *, compiled: Compiled = "all"
    ) -> MemoryRows:
        """Bytes of every row.

        Args:
            of: Bytes of the program of this setting.
            budget: Bytes of factors on the device, if the setting has a budget.
            compiled: Program whose activations count: ``"all"``, the one that runs;
                ``"gradient"``, a lower bound that does not depend on the budget;
                ``"known"``, a lower bound of that from measured programs; ``"none"``, zero.

        Raises:
            UnavailableError: an option needs factors, or another optimizer.
        """
        choice = Choice(self.options, self.steps, budget)
        for option in self.ordered:
            option.check(of, choice)
        own_temporaries = (
            (o.temporaries(of, choice) for o in self.ordered) if compiled == "all" else ()
        )
        pass_temporaries = next((nbytes for nbytes in own_temporaries if nbytes is not None), None)
        on_device = of.preconditions and not any(o.takes_bases for o in self.ordered)
        update = of.update_temporaries(bases=on_device) if compiled == "all" else 0
        rows = of.rows(
            of.temporaries(compiled) if pass_temporaries is None else pass_temporaries,
            self._accumulator_bytes(of),
            update,
        )
        if not self._takes_factors:
            steps = self.steps * of.micro_batches.steps
            if compiled == "all":
                of.in_one_program(rows, steps)
            elif of.is_one_program(steps):
                of.bound_of_one_program(rows)
        for option in self.ordered:
            option.change(rows, of, choice)
        return rows

    @property
    def _takes_factors(self) -> bool:
        return any(option.takes_factors for option in self.ordered)

    def _accumulator_bytes(self, of: ProgramBytes) -> int:
        # If factors leave the device, the micro-batches of a step are summed on the host.
        gathered = not self._takes_factors
        dtypes = [o.accumulator_dtype for o in self.ordered if o.accumulator_dtype is not None]
        return of.accumulator_bytes(
            self.steps, gathered=gathered, dtype=dtypes[0] if dtypes else None
        )

    def exchanged(self, of: ProgramBytes) -> Mapping[str, int]:
        """Bytes that devices exchange in a step, if each has a batch of this size."""
        steps = self.steps * of.micro_batches.steps
        return of.exchanged(steps, in_one_program=not self._takes_factors)

    def gradients(self, of: ProgramBytes, budget: int | None) -> float:
        """Cost of a step in gradients, without Gram products and decompositions."""
        choice = Choice(self.options, self.steps, budget)
        return math.prod((option.gradients(of, choice) for option in self.ordered), start=1.0)

    def costs(self, of: ProgramBytes, budget: int | None) -> dict[str, str]:
        """Description of the cost of each option."""
        choice = Choice(self.options, self.steps, budget)
        return {option.name: option.cost(of, choice) for option in self.ordered}


def _marks_outputs(
    loss: Callable[..., Any], params: ArrayTree, batch: Any, state: ArrayTree
) -> bool:
    extra = {"key": shape_of_key()} if takes_key(loss) else {}
    extra |= {} if state is None else {"state": state}
    traced, _ = jaxpr_of(lambda p, b, kw: loss(p, b, **kw), params, batch, extra)
    return bool(marks_of(traced.jaxpr))


class TrainingPrograms:
    """The programs of all settings, each built once.

    Args:
        objective: The objective.
        params: Shapes of the parameters.
        batch: Shapes of the batch.
        config: Settings of the adapters.
        collection: Arguments of ``value_grad_and_factors``.
        temporaries: Computes what a program needs beside its arguments and results.
        state: Shapes of the state that a call changes, ``None`` without.
        placement: Placement of the arrays.
        frozen: Shapes inside the batch that are parameters no step changes, ``None`` without.

    Attributes:
        temporaries: As given.
    """

    def __init__(
        self,
        objective: Callable[..., Any],
        params: ArrayTree,
        batch: Any,
        config: lslora.Config,
        collection: Mapping[str, Any],
        temporaries: Temporaries,
        state: ArrayTree = None,
        placement: Placement = WHOLE,
        *,
        frozen: ArrayTree = None,
    ) -> None:
        self.temporaries = temporaries
        collection = dict(collection)
        of_rows = not isinstance(objective, Objective)
        if of_rows and not _marks_outputs(objective, params, batch, state):
            collection.setdefault("loss_terms", 1)  # shapes do not depend on it
        aux = bool(getattr(objective, "has_aux", collection.get("has_aux", False)))
        self._plain = TrainingProgram(
            *(objective, params, batch, frozen, (), collection, config, aux, state, temporaries),
            placement=placement,
        )
        # Factors of float64 parameters cast to bfloat16 are float32, so their shapes differ.
        self._single = all(x.dtype.itemsize < 8 for x in partition(params)[0].values())
        self._programs: dict[Setting, TrainingProgram | UnavailableError] = {}

    def __call__(self, setting: Setting) -> TrainingProgram:
        """The program of a setting.

        Raises:
            UnavailableError: an option does not apply to the program.
        """
        key = setting.of_program
        if not self.temporaries.compiled:
            key = key.only(lambda option: not option.only_compiled)
        if key not in self._programs:
            try:
                program = key.program(self._plain)
                if key.of_factors != key and self._single:
                    program = dataclasses.replace(program, same_factors=self(key.of_factors))
                if program is not self._plain:
                    check_traces(program)
                if (wider := key.of_more_bits) != key:
                    program = dataclasses.replace(program, wider=self._programs.get(wider))
                self._programs[key] = program
            except UnavailableError as reason:
                self._programs[key] = reason
        result = self._programs[key]
        if isinstance(result, UnavailableError):
            raise result
        return result
