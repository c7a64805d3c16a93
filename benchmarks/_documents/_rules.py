"""Rules that turn a measurement into a verdict; each states itself in a sentence."""

import dataclasses
from typing import Literal, Protocol

Verdict = Literal["true", "partly", "false", "not decidable", "needs a GPU"]


class Measurement(Protocol):
    """What a rule reads: a quantity before the remedy and after it."""

    @property
    def before(self) -> float: ...

    @property
    def after(self) -> float | None: ...


class Rule(Protocol):
    """Decides whether a claim holds."""

    def verdict(self, measured: Measurement) -> Verdict:
        """The verdict of one measurement."""
        ...

    def __str__(self) -> str:
        """The rule in words."""
        ...


def _after(measured: Measurement) -> float:
    if measured.after is None:
        raise ValueError("this rule compares before and after, and nothing was measured after")
    return measured.after


@dataclasses.dataclass(frozen=True)
class Saves:
    """The remedy takes away the claimed share of what was there.

    Attributes:
        share: As claimed; of a range the lower end.
    """

    share: float

    def verdict(self, measured: Measurement) -> Verdict:
        before, after = measured.before, _after(measured)
        saved = (before - after) / before if before > 0 else 0.0
        if saved >= 0.8 * self.share:
            return "true"
        return "partly" if saved >= 0.3 * self.share else "false"

    def __str__(self) -> str:
        return (
            f"saves {self.share:.3g} of it: true from four fifths of that share, partly from three "
            "tenths"
        )


@dataclasses.dataclass(frozen=True)
class Lies:
    """The quantity before the remedy lies in the claimed range.

    Attributes:
        low: Lower end, in the measurement's unit.
        high: Upper end.
    """

    low: float
    high: float

    def verdict(self, measured: Measurement) -> Verdict:
        low, high = self.low, self.high
        if 0.9 * low <= measured.before <= 1.1 * high:
            return "true"
        return "partly" if low / 2 <= measured.before <= 2 * high else "false"

    def __str__(self) -> str:
        ends = f"{self.low:.6g}" if self.low == self.high else f"{self.low:.6g} to {self.high:.6g}"
        return f"is {ends}: true within 10 %, partly within a factor of two"


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A remedy frees what is claimed, or more.

    Attributes:
        low: The lower end of the claimed range, in the measurement's unit.
    """

    low: float

    def verdict(self, measured: Measurement) -> Verdict:
        if measured.before >= 0.9 * self.low:
            return "true"
        return "partly" if measured.before >= self.low / 2 else "false"

    def __str__(self) -> str:
        return f"is at least {self.low:.6g}: true from nine tenths of it, partly from half"


@dataclasses.dataclass(frozen=True)
class Occurs:
    """What the claim speaks of happens at least once."""

    def verdict(self, measured: Measurement) -> Verdict:
        return "true" if measured.before >= 1 else "false"

    def __str__(self) -> str:
        return "occurs: true if counted at least once"


@dataclasses.dataclass(frozen=True)
class Removed:
    """The remedy removes what is there: events, or bytes."""

    def verdict(self, measured: Measurement) -> Verdict:
        before, after = measured.before, _after(measured)
        if before <= 0 or after >= before:
            return "false"
        return "true" if after <= 0.01 * before else "partly"

    def __str__(self) -> str:
        return "removed: true if at most 1 % is left, partly if less, false if none or none was"


@dataclasses.dataclass(frozen=True)
class Unchanged:
    """The remedy leaves the quantity as it is.

    Attributes:
        within: Relative difference that still counts as none.
    """

    within: float = 0.0

    def verdict(self, measured: Measurement) -> Verdict:
        before, after = measured.before, _after(measured)
        difference = abs(after - before) / max(abs(before), 1e-300)
        return "true" if difference <= self.within else "false"

    def __str__(self) -> str:
        return f"unchanged: true within {self.within:.1%}" if self.within else "unchanged: exactly"


@dataclasses.dataclass(frozen=True)
class Agrees:
    """A relative difference is rounding.

    Attributes:
        within: The largest that is.
    """

    within: float

    def verdict(self, measured: Measurement) -> Verdict:
        if measured.before <= self.within:
            return "true"
        return "partly" if measured.before <= 1e-2 else "false"

    def __str__(self) -> str:
        return f"agrees: true up to a relative {self.within:g}, partly up to 0.01"


@dataclasses.dataclass(frozen=True)
class Slows:
    """The remedy costs at most the claimed share of time.

    Attributes:
        most: As claimed.
        margin: What two runs of one program may differ by.
    """

    most: float
    margin: float = 0.03

    def verdict(self, measured: Measurement) -> Verdict:
        slower = _after(measured) / measured.before - 1
        if slower <= self.most + self.margin:
            return "true"
        return "partly" if slower <= 2 * self.most + self.margin else "false"

    def __str__(self) -> str:
        return f"at most {self.most:.0%} slower: true with a margin of {self.margin:.0%}"


@dataclasses.dataclass(frozen=True)
class OnGPU:
    """Only a GPU can show it; there another rule decides.

    Attributes:
        rule: That one.
    """

    rule: Rule

    def verdict(self, measured: Measurement) -> Verdict:
        return self.rule.verdict(measured)

    def __str__(self) -> str:
        return f"on a GPU: {self.rule}"
