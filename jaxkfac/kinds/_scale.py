"""Scales: a parameter times data, or divided by it, element by element."""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception import AxisTable, Eqn, Use, register_kind
from jaxkfac.kinds._elementwise import Elementwise
from jaxkfac.kinds._rows import Array


@register_kind
class Scale(Elementwise):
    """Its gradient at a position is the cotangent times the data there, or one over them."""

    name = "scale"
    primitives = frozenset(("mul", "div"))
    suffix = "scale"

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        (position,) = positions
        if eqn.primitive.name == "div" and position == 1:
            return "divides data in `div`"
        data = ins[1 - position]
        return [Use(self, eqn, position, ins[position], scope, data=data, rows=data.axes)]

    def gradient(self, use: Use, operands: Sequence[Any], cotangent: Array) -> Array:
        data = operands[1 - use.operand].astype(cotangent.dtype)
        return cotangent / data if use.eqn.primitive.name == "div" else cotangent * data
