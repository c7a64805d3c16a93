"""The answers to two questions about a program: do the examples of its batch meet?"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxkfac.interception._plan import Plan
from jaxkfac.interception.coupling._follow import Follower
from jaxkfac.interception.coupling._labels import FREE, MIXED, Labels, examples_along, simplified
from jaxkfac.interception.coupling._values import (
    QUESTIONS,
    Dependence,
    LabeledValue,
    Question,
    is_inexact,
)
from jaxkfac.interception.values._axes import Atoms, Axes, AxisTable

Word = Literal["apart"]


class Answer(NamedTuple):
    """Whether an example's output depends on another example.

    Attributes:
        answer: ``"no"`` is proved, ``"yes"`` follows from a rule, and ``"unknown"`` never counts as
            no.
        where: The equation, in words.
    """

    answer: Literal["no", "yes", "unknown"]
    where: str = ""

    def lets_pass(self, examples: Word | None) -> bool:
        """Whether examples may be treated as independent.

        They may if that is proved, and if it is unknown and the caller asserts it
        (``examples="apart"``).
        """
        return self.answer == "no" or (self.answer == "unknown" and examples == "apart")

    def __str__(self) -> str:
        if self.answer == "no":
            return "the examples do not meet"
        if self.answer == "yes":
            return f"the examples meet {self.where}"
        return f"it is not known whether the examples meet {self.where}"


NO = Answer("no")


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers to both questions.

    Attributes:
        value: Does an example's output depend on another example's value? To run examples alone,
            this has to be no.
        derivative: Does it have a derivative with respect to another example's value, or to a row
            of a layer that belongs to another example? For one backward pass of all examples, this
            has to be no.
    """

    value: Answer = NO
    derivative: Answer = NO

    def of(self, question: Question) -> Answer:
        return self.value if question == "value" else self.derivative


def label_inputs(
    table: AxisTable,
    axes_of: dict[int, Axes],
    shapes: Sequence[tuple[int, ...]],
    output: Atoms,
    number: int,
    *,
    state: frozenset[int] = frozenset(),
) -> dict[int, Labels]:
    """The example that each entry of each input belongs to.

    If the program links an axis of the input to the output's, that axis is the examples; otherwise
    it is the first axis of the same length. A state that is not linked has no examples, provided
    that some input is linked. An input without such an axis is common to all examples.

    Args:
        table: The axis atoms.
        axes_of: Axes of the inputs that are data, by position.
        shapes: The shapes of all inputs.
        output: Atoms of the output's leading axis.
        number: Number of examples.
        state: Positions of inputs that a call changes.
    """
    example_atoms = table.atoms(output)
    labels: dict[int, Labels] = {
        k: linked
        for k, axes in axes_of.items()
        if (linked := _linked(table, axes, shapes[k], example_atoms)) is not None
    }
    any_linked = bool(labels)
    for k in axes_of:
        # Batch statistics may by chance have as many channels as there are examples. Where another
        # input shows the example axis, that axis of a state is not taken for the examples.
        if k in labels or (k in state and any_linked):
            continue
        axis = next((d for d, size in enumerate(shapes[k]) if size == number), None)
        if axis is not None:
            labels[k] = examples_along(axis, len(shapes[k]), number)
    return labels


def _linked(table: AxisTable, axes: Axes, shape: Sequence[int], example_atoms: Atoms) -> Labels:
    """Labels of an input that has all atoms of the examples; ``None`` for another input."""
    flat = [(d, a) for d, axis in enumerate(axes) for a in table.atoms(axis)]
    atoms = [a for _, a in flat]
    if (
        not example_atoms
        or len(set(example_atoms)) < len(example_atoms)
        or not set(example_atoms) <= set(atoms)
    ):
        return None
    index = np.zeros([table.size(a) for a in atoms], np.int32)
    for a in example_atoms:
        along = [table.size(a) if b == a else 1 for b in atoms]
        # The examples are numbered in the output's order of atoms, whatever the order of this
        # input's axes; otherwise equal numbers would stand for different examples.
        index = index * table.size(a) + np.arange(table.size(a), dtype=np.int32).reshape(along)
    return simplified(index.reshape(shape))


def leading_labels(
    axes_of: dict[int, Axes],
    shapes: Sequence[tuple[int, ...]],
    number: int,
    *,
    state: frozenset[int] = frozenset(),
) -> dict[int, Labels] | None:
    """Labels by which entry ``i`` of every input is example ``i``, except for states.

    ``None`` if an input has another leading axis.
    """
    inputs = [k for k in axes_of if k not in state and shapes[k]]
    if any(shapes[k][0] != number for k in inputs):
        return None
    return {k: examples_along(0, len(shapes[k]), number) for k in inputs}


def answers(
    plan: Plan, number: int, num_parameters: int, labels: dict[int, Labels], outputs: Sequence[int]
) -> list[Answers]:
    """Both answers for each of some outputs, whose leading axes are the examples.

    Args:
        plan: The program and its layers.
        number: Number of examples.
        num_parameters: Number of inputs, at the start, that are parameters.
        labels: Labels of the other inputs, by position; inputs without labels have no examples.
        outputs: Positions of the outputs.
    """
    ins = []
    for k, var in enumerate(plan.jaxpr.invars):
        dependence = Dependence(labels.get(k))
        derivative = dependence if is_inexact(var) else Dependence()
        ins.append(LabeledValue(dependence, derivative, parameter=k < num_parameters))
    outs = Follower(number).run(plan.jaxpr, plan.consts, ins, plan)
    return [
        Answers(*[_answer(outs[k], outs[k].of(question), number) for question in QUESTIONS])
        for k in outputs
    ]


def _answer(out: LabeledValue, dependence: Dependence, number: int) -> Answer:
    # A batch of one has nobody to meet.
    if dependence.labels is None or number == 1:
        return NO
    along = examples_along(0, dependence.labels.ndim, number)
    if ((dependence.labels == FREE) | (dependence.labels == along)).all():
        return NO
    # Every entry belongs to one example, but entry i is not of example i: the examples were
    # permuted or moved to another axis, and a cotangent at entry i reaches another example's rows.
    if not (dependence.labels == MIXED).any():
        return Answer("yes", f"at `{out.moved}`" if out.moved else "in another axis of the output")
    if dependence.reason is None:
        return Answer("unknown", "somewhere")
    return Answer("yes" if dependence.reason.certain else "unknown", dependence.reason.where)
