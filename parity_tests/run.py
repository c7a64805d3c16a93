"""Run one case: its largest error, its place in the report, its verdict."""

from typing import Any, NamedTuple

from parity_tests.cases import Case
from parity_tests.compare import Difference, ParityError, furthest
from parity_tests.precision import precision
from parity_tests.sides import Workshop


class Measured(NamedTuple):
    """What a case has shown."""

    difference: Difference

    def record(self, case: Case) -> dict[str, Any]:
        """One line of the report, as plain values: it travels between processes."""
        return {
            "part": case.part,
            "name": case.name,
            "problem": case.problem,
            "dtype": "tf32" if case.tf32 else case.dtype,
            "device": case.device,
            "error": self.difference.error,
            "where": f"{self.difference.layer}, {self.difference.what}",
            "tolerance": case.tolerance,
            "reason": case.reason,
            "digits": self.difference.digits,
        }

    def hold(self, case: Case) -> None:
        """Refuse an error above the tolerance.

        Raises:
            ParityError: naming the layer, the error and the tolerance.
        """
        layer, what, error = self.difference
        if not error <= case.tolerance:
            raise ParityError(
                f"{case}: layer {layer!r}, {what}: relative error {error:.3g}, allowed "
                f"{case.tolerance:.3g} ({case.reason})"
            )


def measure(case: Case, workshop: Workshop) -> Measured:
    """The largest error of a case.

    Raises:
        ParityError: the two sides differ in a shape.
    """
    with precision(case.dtype, case.device, tf32=case.tf32):
        sides = workshop.sides(case.problem, case.dtype, case.device, tf32=case.tf32)
        return Measured(furthest(case.pairs(sides)))
