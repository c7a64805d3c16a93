"""Each deliberate fault is caught by the cases that name it: the suite can fail."""

import jax
import pytest

from parity_tests.cases import Case
from parity_tests.compare import ParityError
from parity_tests.faults import FAULTS, Fault
from parity_tests.run import measure
from parity_tests.sides import Workshop
from parity_tests.tables import every_case

# These stay in the list whatever else comes and goes.
REQUIRED = {
    "transposed kernel",
    "missing ones column",
    "wrong count in a mask",
    "float16 accumulation",
    "clipped vectors",
    "dropped scaling",
    "adapter without its scaling",
    "phi without its tanh",
    "swapped gradients of coefficients",
    "sigma with its sign",
    "wrong placement",
}


def _case(part: str, name: str, problem: str) -> Case:
    wanted = part, name, problem, "float64", "cpu"
    found = [
        case
        for case in every_case()
        if (case.part, case.name, case.problem, case.dtype, case.device) == wanted
    ]
    assert len(found) == 1, f"{len(found)} cases are called {wanted}"
    return found[0]


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch):
    """Put a fault into the library for one test; nothing compiled before or within it stays."""

    def put(fault: Fault) -> None:
        jax.clear_caches()
        fault.inject(monkeypatch)

    yield put
    monkeypatch.undo()
    jax.clear_caches()


# One of each part of the library, of those whose cases compile in two seconds or three; the others
# are for the exhaustive run.
QUICK = {
    "wide patches in another order",
    "clipped vectors",
    "micro-batches of equal weight",
    "counts that do not decay",
    "phi without its tanh",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=fault.name,
            marks=[] if fault.name in QUICK else [pytest.mark.exhaustive],
        )
        for fault in FAULTS
    ],
)
def test_fault_is_caught(fault: Fault, inject):
    cases = [_case(*names) for names in fault.caught_by]
    inject(fault)
    workshop = Workshop()
    for case in cases:
        with pytest.raises(ParityError, match=r"relative error|shape"):
            measure(case, workshop).hold(case)


def test_every_required_fault_is_in_the_list():
    assert {fault.name for fault in FAULTS} >= REQUIRED
    assert all(fault.caught_by for fault in FAULTS)
