"""Scales: a parameter times data, element by element."""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception import AxisTable, Eqn, Use, register_kind
from jaxkfac.kinds._elementwise import Elementwise
from jaxkfac.kinds._rows import Array


@register_kind
class Scale(Elementwise):
    """Its gradient at a position is the cotangent times the data there."""

    name = "scale"
    primitives = frozenset(("mul",))
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
        data = ins[1 - position]
        return [Use(self, eqn, position, ins[position], scope, data=data, rows=data.axes)]

    def gradient(self, use: Use, operands: Sequence[Any], cotangent: Array) -> Array:
        return cotangent * operands[1 - use.operand].astype(cotangent.dtype)
