"""A pytest plug-in, ``-p parity_tests.schedule``: one worker for one problem and dtype.

What is compiled for these cases is then compiled once. (The groups of pytest-xdist itself,
``--dist loadgroup``, have no effect with pytest 9.2.)
"""

from typing import Any

import pytest

# Few tests that take long, so that no worker is left with them at the end.
WHOLE_RUNS = ("/cli/", "users_kernels", "several_processes", "notebooks", "host_memory")


def group_of(nodeid: str) -> str:
    """What runs on one worker, from the name of a test.

    Cases end in ``problem, dtype, device]``; each deliberate fault compiles for itself; other
    tests stay with their file.
    """
    file, _, name = nodeid.partition("::")
    if name.startswith("test_fault_is_caught["):
        return nodeid
    if not name.endswith((", cpu]", ", gpu]")):
        return file
    *_, problem, dtype, _ = name.split(", ")
    return f"{problem}, {dtype.replace('tf32', 'float32')}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute by :func:`group_of`: whole runs, then the largest groups first."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByProblem(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            is_run = (x for x in self.workqueue if any(part in x for part in WHOLE_RUNS))
            if scope := next(is_run, None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByProblem(config, log)
