"""Parameters behind a weight that is computed from them: weight norm, a merged adapter."""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception import Axes, AxisTable, Eqn, Use, register_kind
from jaxkfac.kinds._elementwise import Elementwise


@register_kind
class Reparameterised(Elementwise):
    """The diagonal of its gradient, from a second pass over the examples.

    It is found where the weight meets data, whatever reads that.
    """

    name = "reparameterised"
    suffix = "reparameterised"
    rank = 2
    contracts = True
    covered = False

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        return "is behind a weight that is computed from it"

    def place(self, use: Use, axes: Axes) -> None:
        use.rows = use.result = axes
