"""Scales: a parameter times data, or another function of both, element by element."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.interception import AxisTable, Eqn, Use, bind, register_kind
from jaxkfac.kinds._elementwise import Elementwise
from jaxkfac.kinds._rows import ArrayOrShape


@register_kind
class Scale(Elementwise):
    """Its gradient at a position is the cotangent times the derivative there, often the data."""

    name = "scale"
    primitives = frozenset("mul div pow max min".split())
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

    def gradient(self, use: Use, operands: Sequence[Any], cotangent: ArrayOrShape) -> ArrayOrShape:
        data = operands[1 - use.operand]
        if use.eqn.primitive.name == "mul":
            return cotangent * data.astype(cotangent.dtype)

        def of_parameter(x: ArrayOrShape) -> ArrayOrShape:
            return bind(use.eqn)(*((x, data) if use.operand == 0 else (data, x)))

        parameter = operands[use.operand]
        derivative = jax.jvp(of_parameter, [parameter], [jnp.ones_like(parameter)])[1]
        return cotangent * derivative.astype(cotangent.dtype)
