"""Parameters that no other kind covers: a diagonal from a second pass."""

from typing import Any

from jaxkfac.interception import AxisTable, Use
from jaxkfac.kinds._elementwise import Elementwise


class Uncovered(Elementwise):
    """It is found nowhere: the coverage report names its parameters."""

    name = "diagonal"
    suffix = "diagonal"
    rank = 3
    covered = False

    def find(
        self, table: AxisTable, eqn: Any, ins: Any, positions: Any, scope: Any
    ) -> list[Use] | str:
        return "is covered by a second pass only"
