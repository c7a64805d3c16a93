"""What can be changed so that a training fits, from the cheapest to the dearest."""

import dataclasses
from typing import Literal, get_args

Lever = Literal["accumulation", "host", "accumulator", "remat", "bf16", "budget", "adapters", "nf4"]
# The order is that of the search: of two sets of one size, the one whose dearest is cheaper.
# Accumulation costs no arithmetic, the host its own time, sums in bfloat16 a few roundings, remat
# a third of a gradient, bfloat16 digits, a budget whole passes; adapters train another model, NF4
# another one still.
LEVERS: tuple[Lever, ...] = get_args(Lever)

TITLES: dict[Lever, str] = {
    "accumulation": "accum.",
    "host": "host",
    "accumulator": "bf16-acc.",
    "remat": "remat",
    "bf16": "bf16",
    "budget": "budget",
    "adapters": "adapters",
    "nf4": "NF4",
}


def needed(lever: Lever, accumulation_steps: int) -> Lever:
    """What a lever cannot do without; itself if there is no such thing."""
    if lever == "accumulator" and accumulation_steps == 1:
        return "accumulation"
    return "adapters" if lever == "nf4" else lever


class UnavailableError(Exception):
    """A lever that this program, batch or optimizer does not have, and why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A set of levers; hashable.

    Attributes:
        levers: Those that are pulled.
        steps: Parts of the batch; 1 unless ``"accumulation"`` is pulled.
    """

    levers: frozenset[Lever] = frozenset()
    steps: int = 1

    def __contains__(self, lever: object) -> bool:
        return lever in self.levers

    @property
    def ordered(self) -> tuple[Lever, ...]:
        """The levers, cheapest first."""
        return tuple(lever for lever in LEVERS if lever in self.levers)
