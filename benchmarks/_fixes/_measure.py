"""One variant of one case, in a process of its own."""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from benchmarks._fixes._sizes import SIZES, Size

Framework = Literal["torch", "jax"]
Variant = Literal["before", "after"]


def in_fresh_process(
    case: str, framework: Framework, variant: Variant, *, size: str, device: str, runs: int
) -> dict[str, Any]:
    """Peak bytes beyond what was there before, and seconds."""
    env = {
        **os.environ,
        # Freed arrays go back to the system at once; without it glibc keeps some of them.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        # One thread in PyTorch and in LAPACK: two of them wait for each other on a busy machine.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if device == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    words = ["--measure", case, framework, variant]
    options = ["--size", size, "--device", device, "--runs", str(runs)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fixes", *words, *options],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{framework} {variant} of {case} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    case: str, framework: Framework, variant: Variant, *, size: Size, device: str, runs: int
) -> dict[str, Any]:
    """The same, in this process: a first run that is not counted, then medians over ``runs``."""
    if framework == "torch":
        from benchmarks._fixes._torch_programs import PROGRAMS

        program: Any = PROGRAMS[case](size, device)
        peak_of = _torch_cuda_peak if device == "cuda" else _resident_peak
        wait: Callable[[Any], Any] = _wait_for_cuda if device == "cuda" else lambda out: out
    else:
        import jax

        from benchmarks._fixes._jax_programs import PROGRAMS

        if (jax.default_backend() == "gpu") != (device == "cuda"):
            raise RuntimeError(f"--device {device}, and JAX's is {jax.default_backend()!r}")
        program = PROGRAMS[case](size)
        peak_of = _jax_peak
        wait = jax.block_until_ready
    work = getattr(program, variant)

    def one_run() -> tuple[int | None, float]:
        state = [wait(program.prepare())]
        gc.collect()
        seconds = 0.0

        def timed() -> Any:
            nonlocal seconds
            start = time.perf_counter()
            out = wait(work(state.pop()))
            seconds = time.perf_counter() - start
            return out

        return peak_of(timed), seconds

    # PyTorch tells of those that it makes by itself, where its debug mode knows them.
    counted = _synchronisations if framework == "torch" else _uncounted
    synchronisations = counted(one_run)
    found = [one_run() for _ in range(runs)]
    peaks = [peak for peak, _ in found if peak is not None]
    return {
        "peak_bytes": int(statistics.median(peaks)) if len(peaks) == runs else None,
        "seconds": statistics.median(seconds for _, seconds in found),
        "seconds_range": [min(s for _, s in found), max(s for _, s in found)],
        "synchronisations": synchronisations,
    }


def _resident_peak(work: Callable[[], Any]) -> int | None:
    resident = _resident()
    _return_free_memory()
    before, lowered = resident.resident_bytes(), resident.lower_mark()
    out = work()  # held until the peak has been read
    mark = resident.resident_mark()
    del out
    return max(mark - before, 0) if lowered and mark is not None and before is not None else None


def _resident() -> Any:
    """``jaxkfac.memory._resident`` alone: the whole library would bring JAX to PyTorch's side."""
    library = importlib.util.find_spec("jaxkfac")
    assert library is not None and library.origin is not None
    file = Path(library.origin).parent / "memory" / "_resident.py"
    spec = importlib.util.spec_from_file_location("resident", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _return_free_memory() -> None:
    """Small blocks, too: what the first run freed would otherwise hide what this one takes."""
    with contextlib.suppress(AttributeError, OSError):  # glibc has it, others may not
        ctypes.CDLL(None).malloc_trim(0)


def _jax_peak(work: Callable[[], Any]) -> int | None:
    import jax

    from jaxkfac.memory import track

    _return_free_memory()
    with track("run") as stage:
        out = work()
    del out
    if jax.default_backend() != "gpu":
        peak, before = stage.resident_peak, stage.resident_before
    else:
        (device,) = list(stage.device_peaks)[:1]
        peak, before = stage.device_peaks[device], stage.device_before[device]
    return max(peak.nbytes - before, 0) if peak and before is not None else None


def _torch_cuda_peak(work: Callable[[], Any]) -> int:
    import torch

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = work()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return max(peak, 0)


def _uncounted(work: Callable[[], Any]) -> None:
    work()


def _synchronisations(work: Callable[[], Any]) -> int | None:
    """How often PyTorch waits for the GPU meanwhile; ``None`` without one."""
    import torch

    if not torch.cuda.is_available():
        work()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def _wait_for_cuda(out: Any) -> Any:
    import torch

    torch.cuda.synchronize()
    return out


def sized(name: str) -> Size:
    """The sizes of that name."""
    return SIZES[name]
