"""What settings need: one at a time, and the smallest set that fits."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxkfac.planning._options import OPTIONS, Accumulation, Budget
from jaxkfac.planning._program_bytes import Curvature, MemoryRows, MicroBatches, ProgramBytes
from jaxkfac.planning._setting import Setting, TrainingPrograms
from jaxkfac.planning._shapes import UnavailableError, divisors, num_examples

_ROUNDS = 4  # two are enough where a pass allocates in proportion to its budget


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What a setting needs.

    Attributes:
        options: The options, cheapest first; ``()`` is the training as it stands.
        steps: Micro-batches a step.
        device: Bytes on the device by row.
        host: Bytes of main memory by row.
        costs: What each option costs, in words.
        factor_budget: ``max_factor_bytes``, where ``"budget"`` is among the options.
    """

    options: tuple[str, ...]
    steps: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    costs: Mapping[str, str]
    factor_budget: int | None

    @property
    def device_total(self) -> int:
        """The sum of the device's rows."""
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        """The sum of the host's rows."""
        return sum(self.host.values())

    @property
    def largest(self) -> str:
        """The device's largest row."""
        return max(self.device, key=self.device.__getitem__)


class Search:
    """Estimates of settings, each computed once.

    Args:
        programs: The programs.
        batch: Shapes.
        tx: The optimizer.
        curvature: What is done with factors, or ``None``.
        device_bytes: What there is.
        host_bytes: Likewise, ``None`` for no limit.
        max_factor_bytes: The budget of ``"budget"``; ``None`` takes what is left over.
        options: Which may be used.
        micro_batches: Of the training as it stands.
    """

    def __init__(
        self,
        programs: TrainingPrograms,
        batch: Any,
        tx: optax.GradientTransformation | None,
        curvature: Curvature | None,
        *,
        device_bytes: float | int,
        host_bytes: float | int | None,
        max_factor_bytes: int | None,
        options: Sequence[str],
        micro_batches: MicroBatches,
    ) -> None:
        self._programs, self._batch, self._tx = programs, batch, tx
        self._curvature, self._budget = curvature, max_factor_bytes
        self._device_bytes, self._host_bytes = device_bytes, host_bytes
        self._options, self._micro_batches = options, micro_batches
        self._bytes: dict[int, ProgramBytes] = {}
        self._estimates: dict[Setting, MemoryEstimate] = {}

    @property
    def tried(self) -> list[MemoryEstimate]:
        """Every estimate that was computed in full."""
        return list(self._estimates.values())

    def fits(self, estimate: MemoryEstimate) -> bool:
        """Whether there are that many bytes."""
        host = self._host_bytes is None or estimate.host_total <= self._host_bytes
        return host and estimate.device_total <= self._device_bytes

    def estimate(self, options: Sequence[str]) -> MemoryEstimate:
        """What some options need, with the fewest micro-batches that fit, or else the most.

        Raises:
            UnavailableError: one of them cannot be used.
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
        """What the smallest set of options that fits needs, ``None`` if none does.

        Of sets of one size the one whose dearest option is the cheapest. A set whose other rows
        alone are too large is passed over without a compilation.
        """
        for options in self._sets():
            try:
                if self._may_fit(options) and self.fits(estimate := self.estimate(options)):
                    return estimate
            except UnavailableError:
                continue
        return None

    def best(self) -> MemoryEstimate:
        """What the set with the fewest bytes on the device needs, among those that were tried."""
        floors: list[tuple[int, tuple[str, ...]]] = []
        for options in self._sets():
            try:
                floors.append((sum(self._floor(options)[0].values()), options))
            except UnavailableError:
                continue
        self.estimate(min(floors, key=lambda found: found[0])[1])
        return min(self.tried, key=lambda estimate: (estimate.device_total, len(estimate.options)))

    def _sets(self) -> Iterator[tuple[str, ...]]:
        for size in range(len(self._options) + 1):
            found: Iterator[tuple[str, ...]] = itertools.combinations(self._options, size)
            dearness = lambda names: [list(OPTIONS).index(name) for name in reversed(names)]
            for names in sorted(found, key=dearness):
                if all(self.needed(name) in (*names, "") for name in names):
                    yield names

    def needed(self, name: str) -> str:
        """The option that this one cannot do without; ``""`` is none."""
        return OPTIONS[name].needed(self._micro_batches)

    def _steps(self) -> list[int]:
        if not (steps := divisors(num_examples(self._batch))):
            raise UnavailableError("the batch is one example")
        return steps

    def _floor(self, options: Sequence[str]) -> MemoryRows:
        """Rows without activations, at the most micro-batches and the least budget."""
        steps = self._steps()[-1] if Accumulation.name in options else 1
        setting = Setting(frozenset(options), steps)
        of = self._bytes_of(setting)
        return setting.rows(of, self._least(of, setting), compiled="none")

    def _may_fit(self, options: Sequence[str]) -> bool:
        device, host = self._floor(options)
        fits_host = self._host_bytes is None or sum(host.values()) <= self._host_bytes
        return fits_host and sum(device.values()) <= self._device_bytes

    def _bytes_of(self, setting: Setting) -> ProgramBytes:
        program = self._programs(setting)
        if id(program) not in self._bytes:
            self._bytes[id(program)] = ProgramBytes(
                program, self._tx, self._curvature, self._micro_batches
            )
        return self._bytes[id(program)]

    def _least(self, of: ProgramBytes, setting: Setting) -> int:
        if Budget.name not in setting or self._curvature is None:
            return 0
        return self._budget or of.smallest_budget

    def _estimate(self, setting: Setting) -> MemoryEstimate:
        if setting not in self._estimates:
            of = self._bytes_of(setting)
            budget = None
            if Budget.name in setting:
                budget = self._budget or self._affordable(of, setting)
            rows, costs = setting.rows(of, budget), setting.costs(of, budget)
            steps = setting.steps * self._micro_batches.steps
            self._estimates[setting] = MemoryEstimate(tuple(costs), steps, *rows, costs, budget)
        return self._estimates[setting]

    def _affordable(self, of: ProgramBytes, setting: Setting) -> int:
        """A budget that leaves room for the other rows, the least there is if none does."""
        least = of.smallest_budget
        device = setting.rows(of, least, compiled="gradient").device
        room = int(self._device_bytes) - sum(device.values()) + device["factors"]
        budget = min(max(room, least), of.largest_budget)
        # A pass allocates more than its factors; how much more, only its compilation says.
        for _ in range(_ROUNDS):
            over = sum(setting.rows(of, budget).device.values()) - int(self._device_bytes)
            if over <= 0 or budget == least:
                break
            budget = max(budget - over, least)
        return budget
