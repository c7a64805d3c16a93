"""Where the time of the test suite goes: ``PYTEST_ARGS="-p benchmarks.suite" make test``.

A thread of each worker looks every ten milliseconds at what the main thread does, and names the
cause by the innermost frame that has one. Samples are wall time; processor time, that of started
processes included, is beside their sum. ``--suite=FILE`` is where the table (Markdown) is written;
beside it are the seconds of every test (JSON).
"""

import collections
import json
import os
import resource
import sys
import threading
from pathlib import Path
from time import perf_counter  # tests replace that of the module
from types import FrameType
from typing import Any

import pytest

INTERVAL = 0.01  # seconds between two samples
# Cause, part of a file's name, names of functions (none: every function of the file); the first
# that fits the innermost frames of a sample, outward, is its cause.
CAUSES = [
    ("started processes", "/subprocess.py", ()),
    ("started processes", "/multiprocessing/popen_", ()),
    ("compilation (XLA)", "/jax/_src/compiler.py", ()),
    ("lowering to MLIR", "/jax/_src/interpreters/mlir.py", ()),
    ("analysis of jaxprs", "/jaxkfac/interception/", ()),
    ("analysis of jaxprs", "/jaxkfac/kinds/", ()),
    ("tracing", "/jax/_src/interpreters/partial_eval.py", ()),
    ("tracing", "/jax/_src/interpreters/ad.py", ()),
    ("tracing", "/jax/_src/interpreters/batching.py", ()),
    ("eager dispatch", "/jax/_src/dispatch.py", ()),
    ("eager dispatch", "/jax/_src/array.py", ()),
    ("PyTorch", "/torch/", ()),
    ("PyTorch", "/torch_ref/", ()),
    ("import", "<frozen importlib._bootstrap>", ()),
    ("import", "/_pytest/assertion/rewrite.py", ()),
    ("waiting", "/threading.py", ("wait", "join", "_wait_for_tstate_lock")),
    ("waiting", "/concurrent/futures/", ("result",)),
    ("runtime type checks", "/beartype/", ()),
    ("runtime type checks", "/jaxtyping/", ()),
    ("jax, the rest", "/jax/_src/", ()),
    ("jaxkfac, the rest", "/jaxkfac/", ()),
    ("pytest", "/_pytest/", ()),
    ("pytest", "/xdist/", ()),
    ("tests themselves", "_test.py", ()),
]


def cause(frame: FrameType | None) -> str:
    """The cause of the innermost frame that has one."""
    while frame is not None:
        code = frame.f_code
        for name, part, functions in CAUSES:
            if part in code.co_filename and (not functions or code.co_name in functions):
                return name
        frame = frame.f_back
    return "the rest"


class Sampler(threading.Thread):
    """Counts the causes of the main thread's time.

    Attributes:
        seconds: Wall time by cause.
        tests: Wall and processor seconds by test, with those of processes that have ended.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="suite")
        self.seconds: collections.Counter[str] = collections.Counter()
        self.tests: dict[str, list[float]] = {}
        self._watched = threading.main_thread().ident
        self._done = threading.Event()

    def run(self) -> None:
        before = perf_counter()
        while not self._done.wait(INTERVAL):
            # No frame is kept, because tests count the arrays that are alive.
            name = cause(sys._current_frames().get(self._watched))
            now = perf_counter()
            self.seconds[name] += now - before
            before = now

    def stop(self) -> None:
        self._done.set()
        self.join()


def processor_seconds() -> float:
    """Of this process and of those that it has started and waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(x.ru_utime + x.ru_stime for x in map(resource.getrusage, kinds))


class Suite:
    """The plug-in: a sampler in each process that runs tests, one table of them all."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.parts: list[dict[str, Any]] = []
        self.sampler = Sampler()
        self.start = perf_counter()
        self.sampler.start()

    def record(self) -> dict[str, Any]:
        """What this process has measured."""
        self.sampler.stop()
        return {
            "causes": dict(self.sampler.seconds),
            "tests": self.sampler.tests,
            "processor": processor_seconds(),
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        wall, processor = perf_counter(), processor_seconds()
        result = yield
        name = item.nodeid
        self.sampler.tests[name] = [
            round(perf_counter() - wall, 3),
            round(processor_seconds() - processor, 3),
        ]
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if part := getattr(node, "workeroutput", {}).get("suite"):
            self.parts.append(part)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["suite"] = self.record()
            return
        wall = perf_counter() - self.start
        parts = self.parts or [self.record()]
        path = Path(self.config.getoption("--suite"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(parts))
        path.write_text(table(parts, wall))


def table(parts: list[dict[str, Any]], wall: float) -> str:
    """Wall seconds by cause, of all workers together."""
    causes: collections.Counter[str] = collections.Counter()
    for part in parts:
        causes.update(part["causes"])
    total = sum(causes.values())
    processor = sum(part["processor"] for part in parts)
    rows = [f"| {name} | {x:.0f} | {x / total:.0%} |" for name, x in causes.most_common()]
    head = f"{wall:.0f} s of wall time in {len(parts)} workers on {os.cpu_count()} cores, "
    head += f"{processor:.0f} s of processor time.\n"
    return "\n".join([head, "| cause | s | share |", "|---|---|---|", *rows, ""])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", default="build/suite.md", help="where the table is written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Suite(config), "suite-profile")
