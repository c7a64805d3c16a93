"""The memory that a command needs, and the explanation when memory runs out."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkfac.jobs.cli._devices import axis_sizes
from jaxkfac.jobs.cli._loop import make_evaluation, total_updates
from jaxkfac.jobs.cli._options import AnalyzeArguments, Optimizer, TrainArguments
from jaxkfac.jobs.cli._problem import DigitsProblem, build_optimizer, digits_on_host
from jaxkfac.jobs.cli._progress import phases_of
from jaxkfac.jobs.cli.finetune._options import PRESETS
from jaxkfac.memory import bytes_text
from jaxkfac.planning import IN_TURN, plan_memory

# ---------------- the smallest change of options by which a run fits


Arguments = Any
Change = Callable[[Arguments], Arguments | None]


class Need(NamedTuple):
    """Bytes of a run, by row.

    Attributes:
        rows: Bytes by row.
        how: How the temporaries among them were found.
        not_traced: Why temporaries of the update are not counted; ``""`` if they are.
    """

    rows: Mapping[str, int]
    how: str = ""
    not_traced: str = ""

    @property
    def total(self) -> int:
        """Sum of the rows."""
        return sum(self.rows.values())

    @property
    def largest(self) -> str:
        """Name and bytes of the largest row."""
        row = max(self.rows, key=self.rows.__getitem__)
        return f"{row}, {bytes_text(self.rows[row])}"


class RunShapes(NamedTuple):
    """What is needed to plan a run without its arrays.

    Attributes:
        need: ``need(arguments)`` computes the bytes of a run from shapes.
        changes: Functions from the cheapest to the most expensive change; each returns the changed
            arguments, or ``None`` if it changes nothing. They apply in this order.
        least: ``least(arguments)`` returns a lower bound of the bytes at once, without a plan.
    """

    need: Callable[[Arguments], Need]
    changes: Sequence[Change]
    least: Callable[[Arguments], int] = lambda arguments: 0


def remedy(arguments: Arguments, shapes: RunShapes, room: int) -> str:
    """Explain by which options the run fits ``room`` bytes, or why none suffice."""
    now = shapes.need(arguments)
    stands = f"The plan counts {bytes_text(now.total)} for it ({now.largest})"
    available = f"{bytes_text(room)} can be counted on without it"
    if now.total <= room:
        return (
            f"{stands}, and {available}: it should fit, so that something else holds memory, or "
            "the largest free piece is too small"
        )
    fitting, least = smallest_sets(arguments, shapes, room)
    if fitting:
        sets = "\nor with\n".join(f"  {' '.join(flags(arguments, each))}" for each in fitting)
        return f"{stands}; {available}. By the plan it fits with\n{sets}"
    tried = f": with {' '.join(flags(arguments, least[1]))}" if least[1] is not arguments else ""
    return (
        f"{stands}; {available}. No option of this command is enough{tried} it would still need "
        f"{bytes_text(least[0].total)} ({least[0].largest}): take a smaller model or a larger "
        "device"
    )


def flags(
    before: Arguments, after: Arguments, prefix: str = "", *, default: Arguments = None
) -> list[str]:
    """The command-line words that turn one set of arguments into another.

    A switch has no opposite on the command line. To return to its default, ``default``, it has to
    be left out, and that is said.
    """
    flag_words = []
    if default is None:
        default = PRESETS.get(getattr(before, "preset", "")) or type(before)()
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        name = field.name.replace("_", "-")
        if dataclasses.is_dataclass(new):
            # tyro gives the experiment's own flags no prefix.
            inside = prefix if name == "experiment" else f"{prefix}{name}."
            flag_words += flags(old, new, inside, default=getattr(default, field.name))
        elif isinstance(new, bool):
            switched_on = getattr(default, field.name)
            switch = f"--{prefix}no-{name}" if switched_on else f"--{prefix}{name}"
            flag_words.append(f"without {switch}" if new == switched_on else switch)
        else:
            flag_words.append(f"--{prefix}{name} {new}")
    return flag_words


def accumulations(arguments: Arguments) -> Iterator[Arguments]:
    """Smaller micro-batches and more of them per update, with the same examples per update.

    Each can be divided over the run's devices.
    """
    experiment = arguments.experiment
    size, steps = experiment.batch_size, experiment.gradient_accumulation_steps
    num_devices = axis_sizes(arguments.devices, arguments.mesh)["data"]
    for divisor in range(2, size + 1):
        if size % divisor == 0 and size // divisor % num_devices == 0:
            smaller = {
                "batch_size": size // divisor,
                "gradient_accumulation_steps": steps * divisor,
            }
            changed = dataclasses.replace(experiment, **smaller)
            yield dataclasses.replace(arguments, experiment=changed)


def smallest_sets(
    arguments: Arguments, shapes: RunShapes, room: int
) -> tuple[list[Arguments], tuple[Need, Arguments]]:
    """The sets of changes by which the run fits, each planned; and the least need of all tried.

    A set is listed if none of its subsets fits and it has at most one change more than the fewest,
    since the fewest can be another kind of training. Every set whose lower bound fits is planned
    before the list is empty: a change that saves memory in one set can cost some in another, so
    none is left out by its neighbors. Only finer micro-batches are taken to need no more. If no set
    fits, the one with the smallest lower bound is planned, too, because a message that names
    another would ask for more than is needed.
    """
    least: tuple[Need, Arguments] | None = None
    smallest_bound: tuple[int, Arguments] | None = None
    fitting: dict[frozenset[int], Arguments] = {}
    for numbers, changed in _sets(arguments, shapes.changes):
        if fitting and len(numbers) > min(map(len, fitting)) + 1:
            break
        options = list(accumulations(changed)) if _ACCUMULATION in numbers else [changed]
        # A batch of one cannot be divided.
        if not options or any(subset < numbers for subset in fitting):
            continue
        try:  # without any plan yet, one is made for the message
            bound = shapes.least(changed)
            if least is not None and bound > room:
                # Of equal ones the largest set, which has smaller temporaries, too.
                if smallest_bound is None or bound <= smallest_bound[0]:
                    smallest_bound = bound, options[-1]
                continue
            need = shapes.need(options[-1])
        except ValueError:  # a change that this model refuses, such as blocks that do not divide it
            continue
        if least is None or need.total < least[0].total:
            least = need, options[-1]
        if need.total > room:
            continue
        low, high = 0, len(options) - 1  # the last option fits
        while low < high:
            middle = (low + high) // 2
            if shapes.need(options[middle]).total <= room:
                high = middle
            else:
                low = middle + 1
        fitting[numbers] = options[high]
    if smallest_bound is not None and not fitting:
        with contextlib.suppress(ValueError):  # a change that this model refuses, as above
            need = shapes.need(smallest_bound[1])
            if least is None or need.total < least[0].total:
                least = need, smallest_bound[1]
    return list(fitting.values()), least or (shapes.need(arguments), arguments)


_ACCUMULATION = 0  # the cheapest change


def _sets(
    arguments: Arguments, changes: Sequence[Change]
) -> Iterator[tuple[frozenset[int], Arguments]]:
    """Sets of changes by their numbers, small ones first; changes are numbered from 1."""
    numbered = dict(enumerate(changes, 1))
    for size in range(1, len(changes) + 2):
        for chosen in itertools.combinations([_ACCUMULATION, *numbered], size):
            changed: Arguments | None = arguments
            for number in chosen:
                if number != _ACCUMULATION and changed is not None:
                    changed = numbered[number](changed)
            if changed is not None:
                yield frozenset(chosen), changed


# ---------------- the explanation when memory ran out


EXIT_CODE = 3

# The remainder allows for fragmentation. On the CPU a program's temporaries can still be mapped
# while those of the next are allocated: 1.94 GiB of them failed with 3.03 GiB free.
_OF_A_DEVICE, _OF_MAIN_MEMORY = 0.9, 0.5

GENERAL = (
    "In general: smaller micro-batches with more of them per update (--batch-size, "
    "--gradient-accumulation-steps), shorter rows, a smaller model, or nothing else on the device."
)


def answer(
    error: BaseException,
    arguments: Any,
    shapes_of: Callable[[Arguments], RunShapes] | None = None,
) -> int:
    """Explain the error on standard error; return the exit code.

    It first prints what happened. Only then it frees the run's arrays and plans from shapes, so
    that the first half is printed even if planning fails.

    Args:
        error: An error for which ``jk.memory.is_out_of_memory`` is true.
        arguments: Arguments of the command; ``None`` before they were parsed.
        shapes_of: What plans a run of these arguments, for a command that has such a plan.
    """
    from jaxkfac.memory import TROUBLESHOOTING_PAGE, what_was_short

    doing = phases_of(error)
    where = f"while {doing}: " if doing else ""
    _say(f"jaxkfac: {where}{what_was_short(error)}.")
    _let_go(error)
    del error
    try:
        advice = _advice(arguments, shapes_of)
    except Exception as reason:  # better no plan than a second error
        advice = f"It could not be planned ({type(reason).__name__}). {GENERAL}"
    _say(f"{advice}\nMore: {TROUBLESHOOTING_PAGE}; --debug shows where it happened.")
    return EXIT_CODE


def _advice(arguments: Any, shapes_of: Callable[[Arguments], RunShapes] | None) -> str:
    if arguments is not None and shapes_of is not None:
        return remedy(arguments, shapes_of(arguments), free_room())
    if isinstance(arguments, AnalyzeArguments) and arguments.is_pretrained:
        return (
            "A smaller --device-bytes asks for more passes; --batch-size, --max-length and "
            "--max-dense make each smaller. Finished work is kept: --resume continues."
        )
    return "Look for other processes with `jaxkfac doctor`."


def _let_go(error: BaseException) -> None:
    """Free the arrays held by the frames of an error and of its causes."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__cause__ or link.__context__
    gc.collect()


def free_room() -> int:
    """Bytes that a plan may use, on the first device or in main memory."""
    from jaxkfac.memory import free_bytes, free_host_bytes

    free = free_bytes(jax.local_devices()[0])
    if free is not None:
        return int(free * _OF_A_DEVICE)
    free = free_host_bytes()
    if free is None:
        raise NotImplementedError("the system does not say what is free")
    return int(free * _OF_MAIN_MEMORY)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---------------- bytes of `jaxkfac train`, from shapes


def train_shapes(arguments: TrainArguments) -> RunShapes:
    """Bytes of a run with the more demanding optimizer; allocates nothing."""

    @functools.cache
    def need(arguments: TrainArguments) -> Need:
        chosen = arguments.optimizer
        names: tuple[Optimizer, ...] = ("kfac", "adamw") if chosen == "both" else (chosen,)
        problem = digits_on_host(arguments.experiment)
        needs = [_need(arguments, name, problem) for name in names]
        return max(needs, key=lambda need: need.total)

    return RunShapes(need, [_adamw])


def _adamw(arguments: TrainArguments) -> TrainArguments | None:
    if arguments.optimizer == "adamw":
        return None
    return dataclasses.replace(arguments, optimizer="adamw")


def _need(arguments: TrainArguments, name: Optimizer, problem: DigitsProblem) -> Need:
    experiment = arguments.experiment
    train, size = problem.train, experiment.batch_size
    plan = plan_memory(
        problem.objective,
        problem.shapes,
        (train.images[:size], train.labels[:size]),
        optimizer=build_optimizer(name, experiment, problem, total_updates(experiment, problem)),
        device_bytes=1,
        curvature=name == "kfac",
        options=(),
        compiled="none",
        fisher=experiment.fisher,
    )
    rows = plan.now.at_once
    evaluation = _evaluation_bytes(problem)
    (turn,) = (row for row in rows if row in IN_TURN)
    if evaluation > rows[turn]:  # training and evaluation alternate, so only the larger counts
        del rows[turn]
        rows["evaluation on the whole training set"] = evaluation
    return Need(rows)


def _evaluation_bytes(problem: DigitsProblem) -> int:
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), problem.train)
    compiled: Any = make_evaluation(problem)
    analysis = compiled.lower(problem.shapes, data).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)
