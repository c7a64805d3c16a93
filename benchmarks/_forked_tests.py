"""Test files in a fork of a process that has imported the library, one function of it changed.

To import the library under the runtime type hook takes longer than most tests. So a fork gives the
functions of the changed file their new code. Where the changed line runs at import, or there is no
telling the functions apart, the fork is one of a process that has not imported the library.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_FORK = multiprocessing.get_context("fork")
_BARE: list[Any] = []  # the pipe to the process that has not imported the library
STALLED = 120.0  # seconds on the clock within which a process that works uses half a second


class Outcome(NamedTuple):
    """``failed``: a test, or a limit, or None; ``lines`` executed by file, where asked for."""

    failed: str | None
    said: str
    seconds: float  # of processor time
    lines: dict[str, list[int]]


def preload(tree: Path, compiled: Path) -> dict[str, list[int]]:
    """Import what every fork needs, and nothing that starts a thread or a device.

    Returns the lines of the library that an import executes.
    """
    os.environ |= {
        "JAX_NUM_CPU_DEVICES": "2",  # conftest.py sets these two, but
        "OPENBLAS_NUM_THREADS": "1",  # jax and numpy read them at import
        "CI": "true",  # hypothesis draws the same examples every time
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    os.chdir(tree)
    sys.path[0] = str(tree)
    sys.dont_write_bytecode = False
    for name in ("pytest", "jax", "flax.nnx", "flax.linen", "optax", "hypothesis", "beartype"):
        importlib.import_module(name)
    ours, theirs = _FORK.Pipe()
    _FORK.Process(target=_serve, args=(ours, theirs)).start()
    _BARE.append(ours)
    atexit.register(ours.close)  # which ends that process, before it is waited for
    importlib.import_module("jaxtyping").install_import_hook("jaxkfac", "beartype.beartype")
    with _traced(tree) as lines:
        importlib.import_module("jaxkfac")
    return lines


def _serve(parent: Any, pipe: Any) -> None:
    """Run tests on request, in a process that has not imported the library."""
    parent.close()
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(run(**pipe.recv()))


def run(
    tree: Path,
    seconds: dict[str, float],
    *,
    changed: tuple[Path, str] | None = None,
    anew: bool = False,
    trace: bool = False,
) -> Outcome:
    """Run files in turn until a test fails; each may take three times its seconds and 20 more.

    Args:
        tree: The root that was preloaded.
        seconds: The test files, each with the processor time that it takes unmutated.
        changed: A source file and its text while the tests run.
        anew: Whether the library has to be imported again for it.
        trace: Whether to note the lines that run.
    """
    if anew:
        _BARE[0].send({"tree": tree, "seconds": seconds, "changed": changed, "trace": trace})
        return _BARE[0].recv()
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(tree, seconds, changed, trace, theirs))
    with _written(*changed) if changed else contextlib.nullcontext():
        process.start()
        theirs.close()
        events, used, since = {}, 0.0, time.monotonic()
        while True:
            with contextlib.suppress(EOFError):
                if ours.poll(1):
                    events |= ours.recv()
                    if "failed" not in events and "anew" not in events:
                        continue
                    break
                now = _processor_time(process.pid)
                if now > used + 0.5:
                    used, since = now, time.monotonic()
                if time.monotonic() < since + STALLED:
                    continue
                events |= {"failed": f"stalled in {events.get('at')}"}
            break
        if "end" in events:
            process.join(30)
        process.kill()
        process.join()
    if "anew" in events:
        return run(tree, seconds, changed=changed, anew=True, trace=trace)
    if "end" not in events and "failed" not in events:
        name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else "exit"
        events["failed"] = f"{name} in {events.get('at', 'collection')}"
    failed, said = events.get("failed"), events.get("said", "")
    return Outcome(failed, said, events.get("seconds", used), events.get("lines", {}))


@contextlib.contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    """A file with another text for a while; its time comes back too, so compiled code stays."""
    before, times = path.read_bytes(), path.stat()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _processor_time(pid: int | None) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


# ---------------------------------------------------------------- in the fork


def _work(
    tree: Path,
    seconds: dict[str, float],
    changed: tuple[Path, str] | None,
    trace: bool,
    pipe: Any,
) -> None:
    import pytest

    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = not trace
    start = time.process_time()
    if changed and "jaxkfac" in sys.modules and not _swapped(*changed):
        pipe.send({"anew": True})
        os._exit(0)
    with _traced(tree) if trace else contextlib.nullcontext({}) as lines:
        status = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *seconds],
            plugins=[_Watch(pipe.send, seconds)],
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        pipe.send({"failed": f"pytest ended with {status}"})
    pipe.send({"end": True, "seconds": time.process_time() - start, "lines": lines})
    pipe.close()
    os._exit(0)  # a thread that a mutant keeps from ending does not hold the process


def _swapped(path: Path, text: str) -> bool:
    """Give the functions of a file, as they are in memory, the code of another text."""
    loaded = [x for x in sys.modules.values() if getattr(x, "__file__", None) == str(path)]
    if not loaded:
        return False
    loader: Any = loaded[0].__loader__
    new, rest = {}, [loader.source_to_code(text.encode(), str(path))]
    while rest:
        for code in rest.pop().co_consts:
            if isinstance(code, types.CodeType):
                new.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
                rest.append(code)
    found = 0
    for function in gc.get_objects():
        code = getattr(function, "__code__", None) if type(function) is types.FunctionType else None
        if code is not None and code.co_filename == str(path):
            codes = new.get((code.co_qualname, code.co_firstlineno), ())
            if len(codes) != 1 or len(codes[0].co_freevars) != len(code.co_freevars):
                return False
            if codes[0] != code:
                function.__code__ = codes[0]
                found += 1
    return found > 0


@contextlib.contextmanager
def _traced(tree: Path) -> Iterator[dict[str, list[int]]]:
    """Which lines of the library run meanwhile, by file."""
    library, seen, found = str(tree / "jaxkfac"), set(), {}

    def of_line(frame: Any, event: str, argument: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return of_line

    def of_call(frame: Any, event: str, argument: Any) -> Any:
        return of_line if frame.f_code.co_filename.startswith(library) else None

    threading.settrace(of_call)
    sys.settrace(of_call)
    try:
        yield found
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        for file, line in sorted(seen):
            found.setdefault(os.path.relpath(file, tree), []).append(line)


class _Watch:
    """A pytest plug-in: what fails, and a limit of processor time that moves from file to file."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], seconds: dict[str, float]) -> None:
        self._tell, self._seconds, self._file = tell, seconds, ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self._file:
            self._file = file
            limit = int(time.process_time() + 3 * self._seconds.get(file, 60.0) + 20)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        self._tell({"at": nodeid})

    def _fails(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            first = said.strip().partition("\n")[0]
            self._tell({"failed": report.nodeid or "collection", "said": first[:160]})

    pytest_runtest_logreport = pytest_collectreport = _fails
