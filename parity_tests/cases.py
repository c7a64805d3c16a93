"""A parity case: what is compared, how closely, and why no closer."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pytest

from parity_tests.compare import Pair

Dtype = Literal["float64", "float32", "bfloat16"]
Device = Literal["cpu", "gpu"]

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
}


class Tolerance(NamedTuple):
    """A bound on the relative error, and the reason why it is not smaller."""

    bound: float
    reason: str


def exact(
    times32: float = 1e-5, why: str = "sums of products, none divided"
) -> dict[str, Tolerance]:
    """Tolerances of what is well conditioned; ``times32`` is the bound in float32."""
    return {
        "float64": Tolerance(1e-10, why),
        "float32": Tolerance(times32, why),
        "tf32": Tolerance(2e-2, f"{why}; TF32 keeps 11 bits of each operand of each product"),
    }


def divided(condition: float, times: float = 16) -> dict[str, Tolerance]:
    r"""Tolerances of what is divided by eigenvalues down to $1/\kappa$ of a factor's largest.

    An eigenvector is known to $\varepsilon$ times the largest eigenvalue over a gap, so what is
    left of the large directions in a small one is multiplied by $\kappa$. Two correct float32
    programs were 2 to 15 $\varepsilon \kappa$ apart, for $\kappa$ from 10 to 1e4.
    """
    why = f"divided by eigenvalues: {times:g} epsilon times a factor's condition of {condition:g}"
    return {
        "float64": Tolerance(max(1e-10, times * EPSILON["float64"] * condition), why),
        "float32": Tolerance(max(1e-5, times * EPSILON["float32"] * condition), why),
    }


# Nine batch normalisations, each of which divides by a deviation, add up their rounding: in float64
# the two sides are up to 121 epsilon apart there, and in float32 up to 104, with some processors.
NORMALISED = ("prototypes",)


def _through_layers(tolerance: Tolerance, problem: str, dtype: str) -> Tolerance:
    bound = 256 * EPSILON["float32"]
    if problem not in NORMALISED or dtype != "float32" or tolerance.bound >= bound:
        return tolerance
    return Tolerance(bound, f"{tolerance.reason}; through nine normalised layers: 256 epsilon")


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison on one device in one dtype.

    Attributes:
        part: Of the library: the table it stands in.
        name: What is compared.
        problem: Model and data, a name of ``parity_tests.models.PROBLEMS``.
        pairs: From the two sides to what is compared.
        covers: Public names of jaxkfac that ``pairs`` calls and holds to the reference.
        dtype: Of weights, data and statistics.
        tolerance: Bound on the relative error of every pair.
        reason: Why it is what it is.
        device: ``"gpu"`` cases are skipped where there is none.
        tf32: Whether products of float32 may run in TF32 (on both sides).
    """

    part: str
    name: str
    problem: str
    pairs: Callable[[Any], Iterable[Pair]]
    covers: tuple[str, ...]
    dtype: Dtype
    tolerance: float
    reason: str
    device: Device = "cpu"
    tf32: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1 or not math.isfinite(self.tolerance):
            raise ValueError(
                f"parity case {self}: expected a tolerance between 0 and 1, got {self.tolerance}"
            )
        if not self.reason:
            raise ValueError(f"parity case {self}: a tolerance needs its reason")

    def __str__(self) -> str:
        dtype = "tf32" if self.tf32 else self.dtype
        return f"{self.part}: {self.name}, {self.problem}, {dtype}, {self.device}"


def cases(
    part: str,
    name: str,
    problems: str | Sequence[str],
    pairs: Callable[[Any], Iterable[Pair]],
    *,
    covers: str | Sequence[str] = (),
    tolerances: Mapping[str, Tolerance] | None,
) -> list[Case]:
    """One case for each problem, device, and dtype that has a tolerance; TF32 is a dtype here.

    Raises:
        ValueError: there is no tolerance.
    """
    if not tolerances:
        raise ValueError(f"parity case {part}: {name} states no tolerance")
    names = [problems] if isinstance(problems, str) else problems
    covered = (covers,) if isinstance(covers, str) else tuple(covers)
    return [
        Case(
            part,
            name,
            problem,
            pairs,
            covered,
            "float32" if dtype == "tf32" else dtype,  # pyright: ignore[reportArgumentType]
            *_through_layers(tolerance, problem, dtype),
            device,
            dtype == "tf32",
        )
        for problem in names
        for dtype, tolerance in tolerances.items()
        for device in (("gpu",) if dtype == "tf32" else ("cpu", "gpu"))
    ]


# tests/encoder_decoder_test.py and parity_tests/few_shot_test.py have them in the default run.
LARGE = ("encoder-decoder", "gated encoder-decoder", "prototypes", "cosine transformer")


def over(table: Sequence[Case]) -> pytest.MarkDecorator:
    """Parametrise a test over a table, one mark for each case that is not in the default run.

    Cases of a GPU are ``gpu``. In the default run are a tenth of those of float64, the closer
    comparison, spread evenly and at least two, and the first of each part in each other dtype;
    ``make parity`` runs all. Models that take 20 s are not among them where a table has others.
    """
    names = [str(case) for case in table]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"parity cases of one name: {twice}")
    close = [case for case in table if (case.device, case.dtype) == ("cpu", "float64")]
    close = [case for case in close if case.problem not in LARGE] or close
    wanted = max(2, len(close) // 10)
    sampled = [close[i * (len(close) - 1) // (wanted - 1)] for i in range(wanted)] if close else []
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=name, marks=_marks(case, table[:i], sampled))
            for i, (case, name) in enumerate(zip(table, names, strict=True))
        ],
    )


def _marks(
    case: Case, before: Sequence[Case], sampled: Sequence[Case]
) -> list[pytest.MarkDecorator]:
    if case.device == "gpu":
        return [pytest.mark.gpu]
    alike = [(x.part, x.dtype, x.device) for x in before]
    first = (case.part, case.dtype, case.device) not in alike
    return (
        [] if case in sampled or (first and case.dtype != "float64") else [pytest.mark.exhaustive]
    )
