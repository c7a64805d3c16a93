"""The smallest change of a command's options by which a run fits, as words to add to it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxkfac.memory import bytes_text

Arguments = Any
Change = Callable[[Arguments], Arguments | None]


class Need(NamedTuple):
    """Bytes of a run, by row.

    Attributes:
        rows: Bytes by row.
    """

    rows: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum of the rows."""
        return sum(self.rows.values())

    @property
    def largest(self) -> str:
        """The largest row, with its bytes."""
        row = max(self.rows, key=self.rows.__getitem__)
        return f"{row}, {bytes_text(self.rows[row])}"


class RunShapes(NamedTuple):
    """What a run can be planned from, once its own arrays are gone.

    Attributes:
        need: ``need(arguments)``: the bytes of a run, from shapes alone.
        changes: From the cheapest to the dearest; each gives the changed arguments, or ``None``
            where there is nothing to change.
    """

    need: Callable[[Arguments], Need]
    changes: Sequence[Change]


def remedy(arguments: Arguments, shapes: RunShapes, room: int) -> str:
    """What the plan says: the options by which the run fits ``room`` bytes, or why none do."""
    now = shapes.need(arguments)
    stands = f"The plan counts {bytes_text(now.total)} for it ({now.largest})"
    there = f"{bytes_text(room)} can be counted on without it"
    if now.total <= room:
        return (
            f"{stands}, and {there}: it should fit, so that something else holds memory, or the "
            "largest free piece is too small"
        )
    found, least = _smallest(arguments, shapes, room)
    if found is not None:
        words = " ".join(flags(arguments, found))
        return f"{stands}; {there}. By the plan it fits with\n  {words}"
    tried = f": with {' '.join(flags(arguments, least[1]))}" if least[1] is not arguments else ""
    return (
        f"{stands}; {there}. No option of this command is enough{tried} it would still need "
        f"{bytes_text(least[0].total)} ({least[0].largest}): take a smaller model or a larger "
        "device"
    )


def flags(before: Arguments, after: Arguments, prefix: str = "") -> list[str]:
    """The words of the command line that turn one set of arguments into another."""
    words = []
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(new):
            # tyro's flags of the experiment itself have no prefix.
            words += flags(old, new, prefix if name == "experiment" else f"{prefix}{name}.")
        elif isinstance(new, bool):
            words.append(f"--{prefix}{name}" if new else f"--{prefix}no-{name}")
        else:
            words.append(f"--{prefix}{name} {new}")
    return words


def accumulations(arguments: Arguments) -> Iterator[Arguments]:
    """Smaller micro-batches, more of them an update, the examples of an update unchanged."""
    experiment = arguments.experiment
    size, steps = experiment.batch_size, experiment.gradient_accumulation_steps
    for parts in range(2, size + 1):
        if size % parts == 0:
            smaller = {"batch_size": size // parts, "gradient_accumulation_steps": steps * parts}
            changed = dataclasses.replace(experiment, **smaller)
            yield dataclasses.replace(arguments, experiment=changed)


def _smallest(
    arguments: Arguments, shapes: RunShapes, room: int
) -> tuple[Arguments | None, tuple[Need, Arguments]]:
    """The smallest set of changes that fits, or ``None``; and the least need that was seen."""
    least: tuple[Need, Arguments] | None = None
    for changed, accumulates in _sets(arguments, shapes.changes):
        options = list(accumulations(changed)) if accumulates else [changed]
        if not options:  # a batch of one
            continue
        need = shapes.need(options[-1])
        if least is None or need.total < least[0].total:
            least = need, options[-1]
        if need.total > room:
            continue
        low, high = 0, len(options) - 1  # the last fits
        while low < high:
            middle = (low + high) // 2
            if shapes.need(options[middle]).total <= room:
                high = middle
            else:
                low = middle + 1
        return options[high], least
    return None, least or (shapes.need(arguments), arguments)


def _sets(arguments: Arguments, changes: Sequence[Change]) -> Iterator[tuple[Arguments, bool]]:
    """Sets of changes, the small ones first; accumulation is the cheapest of all."""
    for size in range(1, len(changes) + 2):
        for chosen in itertools.combinations([None, *changes], size):
            changed: Arguments | None = arguments
            for change in filter(None, chosen):
                changed = None if changed is None else change(changed)
            if changed is not None:
                yield changed, None in chosen
