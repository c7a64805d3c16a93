"""Parameters that no other kind covers: a diagonal from a second pass."""

from collections.abc import Sequence
from typing import Any

from jaxkfac.interception import AxisTable, Eqn, Use, register_kind
from jaxkfac.kinds._elementwise import Elementwise


@register_kind
class Uncovered(Elementwise):
    """It is found nowhere: the coverage report names its parameters."""

    name = "diagonal"
    suffix = "diagonal"
    covered = False

    def find(
        self,
        table: AxisTable,
        eqn: Eqn,
        ins: Sequence[Any],
        positions: Sequence[int],
        scope: tuple[int, ...],
    ) -> list[Use] | str:
        return "is covered by a second pass only"
