"""Where a use is in a program, and the axes that it reads there."""

from collections.abc import Hashable
from typing import NamedTuple

from jaxkfac._jaxpr_compat import Eqn
from jaxkfac.interception.values._axes import Axes


class Scope(NamedTuple):
    """Where an equation is in the program.

    Attributes:
        scans: Identities of the enclosing scans and branches, outermost first.
        where: The equation and the calls around it; equal in every analysis of one program.
    """

    scans: tuple[int, ...]
    where: Hashable


class UseSite(NamedTuple):
    """The operand of an equation that is a parameter.

    Attributes:
        eqn: The equation.
        operand: Position of the parameter among its operands.
        scope: Where the equation is.
    """

    eqn: Eqn
    operand: int
    scope: Scope


class UseAxes(NamedTuple):
    """The axes of a use, each in atoms.

    Attributes:
        inputs: The parameter's contracted axes, in the equation's order.
        outputs: Its free axes, in the equation's order.
        stack: Its axes that are shared with the data (experts, feature groups).
        rows: Axes of the data operand that are neither contracted nor shared.
        result: Axes of the result, for a scale or bias.
        free_stack: Whether the first output axis is read as a stack of experts.
    """

    inputs: Axes = ()
    outputs: Axes = ()
    stack: Axes = ()
    rows: Axes = ()
    result: Axes = ()
    free_stack: bool = False
