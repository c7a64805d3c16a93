"""Estimates for settings, and the search for the smallest set of options that fits."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxkfac._errors import CompilerError, CompilerNotFoundError
from jaxkfac.planning._curvature_bytes import WIDENING
from jaxkfac.planning._options import OPTIONS, Accumulation, Budget
from jaxkfac.planning._program_bytes import (
    IN_TURN,
    SCRATCH,
    Compiled,
    CurvatureChoice,
    MemoryRows,
    MicroBatches,
    ProgramBytes,
    at_once,
)
from jaxkfac.planning._setting import Setting, TrainingPrograms
from jaxkfac.planning._shapes import UnavailableError, divisors, num_examples
from jaxkfac.planning._temporaries import Needs

_ROUNDS = 4  # two suffice if a pass allocates in proportion to its budget


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory and cost of a setting.

    Attributes:
        options: The options, cheapest first; ``()`` is the training as it stands.
        steps: Micro-batches per step.
        device: Bytes on the device by row.
        host: Bytes of main memory by row.
        costs: Description of the cost of each option.
        factor_budget: ``max_factor_bytes``, if ``"budget"`` is among the options.
        gradients: Cost of a step, in gradients of the training as it stands.
        compiled: Whether its temporaries are those that a compiler allocates; otherwise they are
            estimated.
        exchanged: Bytes that collectives return on each device in a step, by purpose, if there are
            several devices.
    """

    options: tuple[str, ...]
    steps: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    costs: Mapping[str, str]
    factor_budget: int | None
    gradients: float
    compiled: bool = False
    exchanged: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def device_total(self) -> int:
        """Bytes on the device at once, with the largest of activations, workspace and update."""
        return sum(self.at_once.values())

    @property
    def at_once(self) -> dict[str, int]:
        """The device's rows that are in memory together."""
        return at_once(self.device)

    @property
    def scratch(self) -> int:
        """Bytes that libraries allocate themselves, by formula; included in the total."""
        return sum(self.device.get(row, 0) for row in SCRATCH)

    @property
    def host_total(self) -> int:
        """Sum of the host's rows."""
        return sum(self.host.values())

    @property
    def exchanged_total(self) -> int:
        """Sum of the exchanged bytes."""
        return sum(self.exchanged.values())

    def fits(
        self, device_bytes: float | int, host_bytes: float | int | None, gradients: float | None
    ) -> bool:
        """Whether it fits the device, the host and a step of some gradients' cost.

        ``None`` means no limit.
        """
        if gradients is not None and self.gradients > gradients:
            return False
        host = host_bytes is None or self.host_total <= host_bytes
        return host and self.device_total <= device_bytes

    @property
    def largest(self) -> str:
        """The largest row on the device."""
        return max(self.at_once, key=self.device.__getitem__)


@dataclasses.dataclass(eq=False)
class Search:
    """Estimates of settings, each computed once.

    If temporaries are counted and a compiler is available, the set found is compiled. If it needs
    more than was counted and no longer fits, the search continues with the corrected value.

    Attributes:
        programs: The programs.
        batch: Shapes of the batch.
        tx: The optimizer.
        curvature: How factors are used, or ``None``.
        device_bytes: Usable bytes on the device.
        host_bytes: Bytes of main memory, ``None`` for no limit.
        max_factor_bytes: Budget for ``"budget"``; ``None`` takes what is left over.
        options: Options that may be used.
        micro_batches: Accumulation of the training as it stands.
        donate: Whether a step donates its parameters and optimizer state.
        max_gradients: Largest cost of a step, in gradients; ``None`` means no limit.
        progress: Function called with a description of what is estimated next.
        compiled: Another search whose estimates are compiled; ``None`` uses no compiler.
        within: Largest relative error of an estimated total.
        devices: Number of devices, each with a batch of this size.
        not_compiled: Why the set found is not compiled.
    """

    programs: TrainingPrograms
    batch: Any
    tx: optax.GradientTransformation | None
    curvature: CurvatureChoice | None
    _: dataclasses.KW_ONLY
    device_bytes: float | int
    host_bytes: float | int | None
    max_factor_bytes: int | None
    options: Sequence[str]
    micro_batches: MicroBatches
    donate: bool = True
    max_gradients: float | None = None
    progress: Callable[[str], None] | None = None
    compiled: "Search | None" = None
    within: float = 0.0
    devices: int = 1
    not_compiled: str = ""
    # Compiled bytes beyond the counted ones.
    _more: dict[Setting, int] = dataclasses.field(default_factory=dict)
    _bytes: dict[int, ProgramBytes] = dataclasses.field(default_factory=dict)
    _updates: dict[Any, Needs | str] = dataclasses.field(default_factory=dict)
    _estimates: dict[Setting, MemoryEstimate] = dataclasses.field(default_factory=dict)

    @property
    def tried(self) -> list[MemoryEstimate]:
        """Every estimate computed in full."""
        return list(self._estimates.values())

    @property
    def not_traced(self) -> str:
        """Why the update's temporaries are not counted; ``""`` if they are."""
        return next((of.not_traced for of in self._bytes.values() if of.not_traced), "")

    def fits(self, estimate: MemoryEstimate) -> bool:
        """Whether an estimate fits the device, the host and the cost of a step."""
        return estimate.fits(self.device_bytes, self.host_bytes, self.max_gradients)

    def estimate(self, options: Sequence[str]) -> MemoryEstimate:
        """The estimate for some options, with the fewest micro-batches that fit, else the most.

        Raises:
            UnavailableError: an option cannot be used.
        """
        chosen = frozenset(options)
        if Accumulation.name not in chosen:
            return self._estimate(Setting(chosen))
        steps = self._steps()
        for extreme in (steps[0], steps[-1]):
            estimate = self._estimate(Setting(chosen, extreme))
            if self.fits(estimate) == (extreme == steps[0]):
                return estimate
        low, high = 1, len(steps) - 1  # the first does not fit, the last does
        while low < high:
            middle = (low + high) // 2
            if self.fits(self._estimate(Setting(chosen, steps[middle]))):
                high = middle
            else:
                low = middle + 1
        return self._estimate(Setting(chosen, steps[high]))

    def smallest(self) -> MemoryEstimate | None:
        """The estimate for the smallest set of options that fits, ``None`` if none does.

        Among sets of one size, the one whose most expensive option is cheapest wins. A set is
        skipped if its other rows alone are too large, or those with only the gradient's
        activations.
        """
        for options in self._sets():
            try:
                if self._may_fit(options) and (estimate := self._confirmed(options)) is not None:
                    return estimate
            except UnavailableError:
                continue
        return None

    def _confirmed(self, options: Sequence[str]) -> MemoryEstimate | None:
        """The estimate for a set if it fits, compiled if a compiler is available."""
        for _ in range(_ROUNDS):
            estimate = self.estimate(options)
            if self.compiled is None:
                return estimate if self.fits(estimate) else None
            if not self._may_be_less(estimate):
                return None
            setting = self._setting_of(estimate)
            try:
                compiled_estimate = self.compiled.at(setting, estimate.factor_budget)
            except CompilerNotFoundError:
                raise
            except CompilerError as error:
                self.not_compiled = str(error)
                return estimate if self.fits(estimate) else None
            if self.compiled.fits(compiled_estimate):
                return compiled_estimate
            more = compiled_estimate.device_total - estimate.device_total
            if more <= 0:
                return None
            self._more[setting] = self._more.get(setting, 0) + more
            del self._estimates[setting]
        return None

    def _may_be_less(self, estimate: MemoryEstimate) -> bool:
        """Whether it fits, or would fit if it were too high by the largest error of estimates."""
        if self.fits(estimate):
            return True
        settled = self._more.get(self._setting_of(estimate)) is not None
        less = dataclasses.replace(
            estimate, device={k: int(x / (1 + self.within)) for k, x in estimate.device.items()}
        )
        return not settled and self.fits(less)

    def _setting_of(self, estimate: MemoryEstimate) -> Setting:
        return Setting(frozenset(estimate.options), estimate.steps // self.micro_batches.steps)

    def best(self) -> MemoryEstimate:
        """The estimate with the fewest bytes on the device, among those computed."""
        floors: list[tuple[int, tuple[str, ...]]] = []
        for options in self._sets():
            try:
                floors.append((self._floor(options).device_total, options))
            except UnavailableError:
                continue
        self.estimate(min(floors, key=lambda floor: floor[0])[1])
        return min(self.tried, key=lambda estimate: (estimate.device_total, len(estimate.options)))

    def _sets(self) -> Iterator[tuple[str, ...]]:
        for size in range(len(self.options) + 1):
            combinations: Iterator[tuple[str, ...]] = itertools.combinations(self.options, size)
            dearness = lambda names: [list(OPTIONS).index(name) for name in reversed(names)]
            for names in sorted(combinations, key=dearness):
                if all(self.needed(name) in (*names, "") for name in names):
                    yield names

    def needed(self, name: str) -> str:
        """The option that this one requires; ``""`` for none."""
        return OPTIONS[name].needed(self.micro_batches)

    def _steps(self) -> list[int]:
        if not (steps := divisors(num_examples(self.batch))):
            raise UnavailableError("the batch is one example")
        return steps

    def _floor(self, options: Sequence[str], compiled: Compiled = "none") -> MemoryRows:
        """The smallest possible rows: most micro-batches, least budget, no activations."""
        steps = self._steps()[-1] if Accumulation.name in options else 1
        setting = Setting(frozenset(options), steps)
        if compiled == "none":
            setting = setting.of_shapes  # its program is built already
        of = self._bytes_of(setting)
        return setting.rows(of, self._least(of, setting), compiled=compiled)

    def _may_fit(self, options: Sequence[str]) -> bool:
        bounds: tuple[Compiled, ...] = ("none", "known", "gradient")
        for compiled in bounds:
            rows = self._floor(options, compiled)
            on_host = sum(rows.host.values()) - rows.host.get(WIDENING, 0)  # fewer steps need less
            fits_host = self.host_bytes is None or on_host <= self.host_bytes
            off = self.within if self.compiled and compiled == "gradient" else 0.0
            if not (fits_host and rows.device_total <= (1 + off) * self.device_bytes):
                return False
        return True

    def _bytes_of(self, setting: Setting) -> ProgramBytes:
        program = self.programs(setting)
        if id(program) not in self._bytes:
            self._bytes[id(program)] = ProgramBytes(
                program,
                self.tx,
                self.curvature,
                self.micro_batches,
                donate=self.donate,
                updates=self._updates,
            )
        return self._bytes[id(program)]

    def _least(self, of: ProgramBytes, setting: Setting) -> int:
        if Budget.name not in setting or self.curvature is None:
            return 0
        return self.max_factor_bytes or of.smallest_budget

    def _estimate(self, setting: Setting) -> MemoryEstimate:
        if setting not in self._estimates:
            self._tell(setting)
            of, budget = self._bytes_of(setting), None
            if Budget.name in setting:
                budget = self.max_factor_bytes or self._affordable(of, setting)
            self._estimates[setting] = self._estimate_at(of, setting, budget)
        return self._estimates[setting]

    def at(self, setting: Setting, budget: int | None) -> MemoryEstimate:
        """The estimate for a setting with a given budget of factors."""
        self._tell(setting)
        return self._estimate_at(self._bytes_of(setting), setting, budget)

    def _estimate_at(
        self, of: ProgramBytes, setting: Setting, budget: int | None
    ) -> MemoryEstimate:
        rows, costs = self._rows(of, setting, budget), setting.costs(of, budget)
        return MemoryEstimate(
            tuple(costs),
            setting.steps * self.micro_batches.steps,
            rows.device,
            rows.host,
            costs,
            budget,
            setting.gradients(of, budget),
            self.programs.temporaries.compiled,
            setting.exchanged(of) if self.devices > 1 else {},
        )

    def _rows(self, of: ProgramBytes, setting: Setting, budget: int | None) -> MemoryRows:
        """The rows, corrected by what compiling this setting has shown to be missing."""
        rows = setting.rows(of, budget)
        if more := self._more.get(setting, 0):
            row = max(IN_TURN, key=lambda row: rows.device.get(row, 0))
            rows.device[row] += more
        return rows

    def _tell(self, setting: Setting) -> None:
        if self.progress is not None:
            compiling = "compiling " * self.programs.temporaries.compiled
            names = " + ".join(x.title for x in setting.ordered) or "as it stands"
            self.progress(compiling + names)

    @property
    def main_temporaries(self) -> int:
        """Temporaries of the training as it stands, in the program that has the gradient."""
        return self._bytes_of(Setting()).main_temporaries

    def _affordable(self, of: ProgramBytes, setting: Setting) -> int:
        """A budget that leaves room for the other rows; the least possible one if none does."""
        least = of.smallest_budget
        rows = setting.rows(of, least, compiled="gradient")
        room = int(self.device_bytes) - rows.device_total + rows.device["factors"]
        budget = min(max(room, least), of.largest_budget)
        # A pass allocates more than its factors; only its program shows how much more.
        too_much: int | None = None
        for _ in range(_ROUNDS):
            over = self._over(of, setting, budget)
            if over <= 0 or budget == least:
                break
            too_much, budget = budget, max(budget - over, least)
        if too_much is None or self._over(of, setting, budget) > 0:
            return budget
        # The correction was often too large, and larger passes are fewer.
        middle = (budget + too_much) // 2
        if self._over(of, setting, middle) <= 0:
            budget = middle
        return budget

    def _over(self, of: ProgramBytes, setting: Setting, budget: int) -> int:
        """Bytes beyond the device's under a budget."""
        return self._rows(of, setting, budget).device_total - int(self.device_bytes)
