"""What a parity test asks for: both sides, kept for a session, and a place in the report."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    raise pytest.UsageError(
        "parity_tests compare jaxkfac with torch_ref, which needs PyTorch, and it is not "
        'installed: pip install -c constraints.txt -e ".[test]", or leave the folder out with '
        "--ignore=parity_tests"
    )

import torch

from parity_tests.cases import Case
from parity_tests.run import measure
from parity_tests.sides import Workshop


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Problems so small that a second thread costs more than it does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def workshop() -> Workshop:
    return Workshop()


@pytest.fixture
def check(workshop: Workshop, request: pytest.FixtureRequest):
    """Run a case, write what was found into the report, and hold it to its tolerance."""

    def run(case: Case) -> None:
        found = measure(case, workshop)
        request.node.user_properties.append(("parity", found.record(case)))
        found.hold(case)

    return run
