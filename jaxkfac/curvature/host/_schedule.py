"""When factors are snapshot and when bases are handed over: step numbers only."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple


class Refresh(NamedTuple):
    """One refresh.

    Attributes:
        step: It sees every push of this step and of those before it.
        group: Which group of blocks is decomposed; ``None`` is all.
        age: How many steps had been pushed by then.
    """

    step: int
    group: int | None
    age: int


class Action(NamedTuple):
    """What to do now. The schedule moves on when the next action is asked for.

    One that was interrupted, or done but not moved on from, is given out again.
    """

    kind: Literal["snapshot", "hand over"]
    refresh: Refresh


@dataclasses.dataclass
class Schedule:
    """The steps of a service.

    The first step pushed is a refresh of everything. After it, the first step pushed at least
    ``every`` steps after the last refresh is one, of the groups in turn. A refresh is *open*
    while its step may still be pushed to; it is snapshot when the step grows. Its bases are
    handed over when bases are asked for at ``step + lag`` or later. One refresh is in work at
    a time, so that one which nobody asked for is handed over before the next snapshot.

    Attributes:
        every: Steps between two refreshes, at least.
        lag: Steps from a refresh to its hand-over.
        groups: How many groups take turns.
        clock: Greatest step pushed or asked for.
        pushed: Greatest step pushed.
        age: How many different steps have been pushed.
        number: How many refreshes have begun.
        last: Step of the last refresh.
        open: A refresh to whose step pushes may still come.
        pending: A refresh that has been snapshot and not handed over.
    """

    every: int
    lag: int
    groups: int
    clock: int | None = None
    pushed: int | None = None
    age: int = 0
    number: int = 0
    last: int | None = None
    open: Refresh | None = None
    pending: Refresh | None = None

    def due(self, step: int) -> Iterator[Action]:
        """What has to be done before factors of ``step`` are taken in. Consume all of it.

        What is done stays done if the push fails afterwards: ``step`` has been seen then.

        Raises:
            ValueError: at once: the step goes backwards, or its bases were taken with ``lag=0``.
        """
        self._check(step, "push")
        if self.lag == 0 and self.last == step and self.open is None:
            raise ValueError(
                f"push at step {step}: with lag=0 its factors have been decomposed already; push "
                "all of a step before asking for its bases, or use lag >= 1"
            )
        over = self.open is not None and step > self.open.step
        return self._snapshot(step) if over else iter(())

    def pushed_to(self, step: int) -> "Schedule":
        """The schedule once factors of ``step`` are taken in, with everything due done.

        A copy, so that a push changes the schedule by one assignment.
        """
        age = self.age + (self.pushed is None or step > self.pushed)
        after = dataclasses.replace(self, clock=step, pushed=step, age=age)
        if self.last is None or step >= self.last + self.every:
            group = (self.number - 1) % self.groups if self.number and self.groups > 1 else None
            after.open = Refresh(step, group, age)
            after.last, after.number = step, self.number + 1
        return after

    def ask(self, step: int, *, have_bases: bool) -> Iterator[Action]:
        """What has to be done before bases of ``step`` are given out. Consume all of it.

        Raises:
            ValueError: the step goes backwards, or there are no bases and nothing to make
                them from.
        """
        self._check(step, "bases")
        if not have_bases and self.open is None and self.pending is None:
            raise ValueError(
                f"bases at step {step}: no factors have been pushed; push first, or pass "
                "initial='identity', like=stats.factor_shapes(params, batch)"
            )
        at_once = self.lag == 0 or not have_bases
        if self.open is not None and (step > self.open.step or at_once):
            yield from self._snapshot(step)
        if self.pending is not None and (step >= self.pending.step + self.lag or not have_bases):
            yield from self._hand_over()
        self.clock = step

    def _check(self, step: int, what: str) -> None:
        if self.clock is not None and step < self.clock:
            raise ValueError(f"{what} at step {step}, but step {self.clock} has been seen before")

    def _snapshot(self, step: int) -> Iterator[Action]:
        if self.pending is not None:
            yield from self._hand_over()
        assert self.open is not None
        yield Action("snapshot", self.open)
        # Together: what is snapshot must not be pushed to again, whatever interrupts this.
        self.pending, self.open, self.clock = self.open, None, step

    def _hand_over(self) -> Iterator[Action]:
        assert self.pending is not None
        yield Action("hand over", self.pending)
        self.pending = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self) | {
            name: None if refresh is None else list(refresh)
            for name, refresh in (("open", self.open), ("pending", self.pending))
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Schedule":
        """The schedule that :meth:`to_dict` described."""
        refreshes = {
            name: None if values[name] is None else Refresh(*values[name])
            for name in ("open", "pending")
        }
        return cls(**{**values, **refreshes})
