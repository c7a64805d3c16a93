"""Settings and what they need: one at a time, and the smallest set that fits."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxkfac.planning._levers import LEVERS, Lever, Setting, UnavailableError, needed
from jaxkfac.planning._rows import Accounts, Accumulation, Curvature
from jaxkfac.planning._shapes import divisors, num_examples
from jaxkfac.planning._variant import Variants

_ROUNDS = 4  # two are enough where a pass allocates in proportion to its budget


@dataclasses.dataclass(frozen=True)
class Need:
    """What a setting needs.

    Attributes:
        levers: The levers, cheapest first; ``()`` is the training as it stands.
        steps: Micro-batches a step.
        device: Bytes on the device by row.
        host: Bytes of main memory by row.
        costs: What each lever costs, in words.
        factor_budget: ``max_factor_bytes``, where ``"budget"`` is among the levers.
    """

    levers: tuple[Lever, ...]
    steps: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    costs: Mapping[Lever, str]
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
    """Needs of settings, each computed once.

    Args:
        variants: The programs.
        batch: Shapes.
        tx: The optimizer.
        curvature: What is done with factors, or ``None``.
        device_bytes: What there is.
        host_bytes: Likewise, ``None`` for no limit.
        max_factor_bytes: The budget of ``"budget"``; ``None`` takes what is left over.
        levers: Which may be pulled.
        accumulation: Of the training as it stands.
    """

    def __init__(
        self,
        variants: Variants,
        batch: Any,
        tx: optax.GradientTransformation | None,
        curvature: Curvature | None,
        *,
        device_bytes: float | int,
        host_bytes: float | int | None,
        max_factor_bytes: int | None,
        levers: Sequence[Lever],
        accumulation: Accumulation,
    ) -> None:
        self._variants, self._batch, self._tx = variants, batch, tx
        self._curvature, self._budget = curvature, max_factor_bytes
        self._device_bytes, self._host_bytes = device_bytes, host_bytes
        self._levers, self._accumulation = levers, accumulation
        self._accounts: dict[int, Accounts] = {}
        self._needs: dict[Setting, Need] = {}

    @property
    def tried(self) -> list[Need]:
        """Every need that was computed in full."""
        return list(self._needs.values())

    def fits(self, need: Need) -> bool:
        """Whether a need is met."""
        host = self._host_bytes is None or need.host_total <= self._host_bytes
        return host and need.device_total <= self._device_bytes

    def need(self, levers: Sequence[Lever]) -> Need:
        """The need of some levers, with the fewest micro-batches that fit, or else the most.

        Raises:
            UnavailableError: one of them cannot be pulled.
        """
        chosen = frozenset(levers)
        if "accumulation" not in chosen:
            return self._need(Setting(chosen))
        steps = self._steps()
        for extreme in (steps[0], steps[-1]):
            need = self._need(Setting(chosen, extreme))
            if self.fits(need) == (extreme == steps[0]):
                return need
        low, high = 1, len(steps) - 1  # the first does not fit, the last does
        while low < high:
            middle = (low + high) // 2
            if self.fits(self._need(Setting(chosen, steps[middle]))):
                high = middle
            else:
                low = middle + 1
        return self._need(Setting(chosen, steps[high]))

    def smallest(self) -> Need | None:
        """The need of the smallest set of levers that fits, ``None`` if none does.

        Of sets of one size the one whose dearest lever is the cheapest. A set whose other rows
        alone are too large is passed over without a compilation.
        """
        for levers in self._sets():
            try:
                if self._may_fit(levers) and self.fits(need := self.need(levers)):
                    return need
            except UnavailableError:
                continue
        return None

    def best(self) -> Need:
        """The need of the set with the fewest bytes on the device among those that were tried."""
        floors: list[tuple[int, tuple[Lever, ...]]] = []
        for levers in self._sets():
            try:
                floors.append((sum(self._floor(levers)[0].values()), levers))
            except UnavailableError:
                continue
        self.need(min(floors, key=lambda found: found[0])[1])
        return min(self.tried, key=lambda need: (need.device_total, len(need.levers)))

    def _sets(self) -> Iterator[tuple[Lever, ...]]:
        for size in range(len(self._levers) + 1):
            found: Iterator[tuple[Lever, ...]] = itertools.combinations(self._levers, size)
            for levers in sorted(found, key=lambda x: [LEVERS.index(y) for y in reversed(x)]):
                steps = self._accumulation.steps
                if all(needed(lever, steps) in levers for lever in levers):
                    yield levers

    def _steps(self) -> list[int]:
        if not (steps := divisors(num_examples(self._batch))):
            raise UnavailableError("the batch is one example")
        return steps

    def _floor(self, levers: Sequence[Lever]) -> tuple[dict[str, int], dict[str, int]]:
        """Rows without activations, at the most micro-batches and the least budget."""
        steps = self._steps()[-1] if "accumulation" in levers else 1
        setting = Setting(frozenset(levers), steps)
        accounts = self._accounts_of(setting)
        return accounts.rows(setting, self._least(accounts, setting), compiled="none")

    def _may_fit(self, levers: Sequence[Lever]) -> bool:
        device, host = self._floor(levers)
        fits_host = self._host_bytes is None or sum(host.values()) <= self._host_bytes
        return fits_host and sum(device.values()) <= self._device_bytes

    def _accounts_of(self, setting: Setting) -> Accounts:
        variant = self._variants(setting)
        if id(variant) not in self._accounts:
            self._accounts[id(variant)] = Accounts(
                variant, self._tx, self._curvature, self._accumulation
            )
        return self._accounts[id(variant)]

    def _least(self, accounts: Accounts, setting: Setting) -> int:
        if "budget" not in setting or self._curvature is None:
            return 0
        return self._budget or accounts.smallest_budget

    def _need(self, setting: Setting) -> Need:
        if setting not in self._needs:
            accounts = self._accounts_of(setting)
            budget = None
            if "budget" in setting:
                budget = self._budget or self._affordable(accounts, setting)
            rows = accounts.rows(setting, budget or 0)
            self._needs[setting] = Need(
                setting.ordered,
                setting.steps * self._accumulation.steps,
                *rows,
                {lever: accounts.cost(lever, setting, budget) for lever in setting.ordered},
                budget,
            )
        return self._needs[setting]

    def _affordable(self, accounts: Accounts, setting: Setting) -> int:
        """A budget that leaves room for the other rows, the least there is if none does."""
        least = accounts.smallest_budget
        device = accounts.rows(setting, least, compiled="gradient").device
        room = int(self._device_bytes) - sum(device.values()) + device["factors"]
        budget = min(max(room, least), accounts.largest_budget)
        # A pass allocates more than its factors; how much more, only its compilation says.
        for _ in range(_ROUNDS):
            over = sum(accounts.rows(setting, budget).device.values()) - int(self._device_bytes)
            if over <= 0 or budget == least:
                break
            budget = max(budget - over, least)
        return budget
