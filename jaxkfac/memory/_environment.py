"""Settings of this machine that affect memory and numerics, and what to change."""

import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxkfac.memory._budget import bytes_text, free_bytes, free_host_bytes

_OLD_FRACTION, _FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
_ALLOCATOR, _PREALLOCATE = "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"
_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class Finding(NamedTuple):
    """One line of the doctor's table.

    Attributes:
        topic: Subject.
        value: Its current value.
        advice: What to change, or why nothing; may be empty.
        problem: Whether the current value will cause a failure.
    """

    topic: str
    value: str
    advice: str = ""
    problem: bool = False


def inspect_environment(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Inspect devices, allocator, precision, attention, memory and threads.

    Querying devices starts their backends, which by default take most of an accelerator's memory.
    Set ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` first where others use the device.

    Args:
        environ: The environment to inspect; by default that of this process.

    Returns:
        The findings, in a fixed order.

    Example:
        >>> import jaxkfac as jk
        >>> [finding.topic for finding in jk.memory.inspect_environment()][:2]
        ['backends', 'device cpu:0']
    """
    environ = os.environ if environ is None else environ
    on_gpu = jax.default_backend() == "gpu"
    return [
        _backends(environ),
        *_devices(),
        *([_other_programs()] if on_gpu else []),
        *(_allocator(environ) if on_gpu else _no_allocator(environ)),
        _precision(environ, on_gpu),
        _attention(on_gpu),
        *_host(environ),
        *_compilation(environ),
    ]


def _backends(environ: Mapping[str, str]) -> Finding:
    platforms = environ.get("JAX_PLATFORMS", "")
    default = jax.default_backend()
    value = f"default {default}; JAX_PLATFORMS={platforms or 'unset'}"
    if default == "cpu" and ("cuda" in platforms or Path("/dev/nvidia0").exists()):
        plugin = _has("jax-cuda12-plugin") or _has("jax-cuda13-plugin")
        why = "the CUDA plug-in is installed but did not start" if plugin else "no CUDA plug-in"
        advice = f'a GPU is meant, and {why}: pip install "jaxkfac[gpu]" fitting the driver'
        return Finding("backends", value, advice, problem=True)
    try:
        jax.devices("cpu")
    except RuntimeError:
        advice = f"there is no CPU backend, which host work needs: JAX_PLATFORMS={platforms},cpu"
        return Finding("backends", value, advice, problem=True)
    return Finding("backends", value)


def _devices() -> Iterator[Finding]:
    for device in jax.local_devices():
        kinds = ", ".join(str(memory.kind) for memory in device.addressable_memories())
        stats, free = device.memory_stats() or {}, free_bytes(device)
        if free is None:
            memory = "no allocator statistics: peaks are None here"
        else:
            peak = stats.get("peak_bytes_in_use", 0)
            memory = f"{bytes_text(free)} of {bytes_text(stats['bytes_limit'])} free"
            memory += f", peak {bytes_text(peak)}"
        capability = getattr(device, "compute_capability", None)
        name = device.device_kind + (f" (sm {capability})" if capability else "")
        yield Finding(f"device {_short(device)}", f"{name}; {memory}; memory kinds {kinds}")


def _other_programs() -> Finding:
    """Other programs that compute on an NVIDIA GPU, as the driver reports them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    topic, how_to_list = "other processes", "nvidia-smi lists them"
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding(topic, "unknown", f"{how_to_list}, where it is installed")
    rows = [row.split(",", 1) for row in done.stdout.splitlines() if "," in row]
    programs = [f"{pid.strip()} ({used.strip()})" for pid, used in rows if int(pid) != os.getpid()]
    if not programs:
        return Finding(topic, "none seen", f"{how_to_list}; a container may hide those of others")
    return Finding(
        topic,
        ", ".join(programs),
        "hold memory that this process cannot have: end your own ones, or share by "
        f"{_PREALLOCATE}=false and {_FRACTION}",
    )


def _allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    allocator = environ.get(_ALLOCATOR, "default")
    advice = f"where memory is free and an allocation still fails, try {_ALLOCATOR}=cuda_async"
    if "expandable_segments" in environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        advice = (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments says nothing to JAX: {_ALLOCATOR}="
            "cuda_async (or vmm, experimental) is nearest"
        )
    if allocator == "platform":
        advice = "asks the driver for every array: exact, and slow; for debugging"
    yield Finding("allocator", allocator, advice)
    preallocates = environ.get(_PREALLOCATE, "true").lower() not in ("false", "0")
    yield Finding(
        "preallocation",
        "on" if preallocates else "off",
        f"takes the fraction below at once; {_PREALLOCATE}=false shares the device"
        if preallocates
        else "memory grows with use and fragments more; leave it on where the device is yours",
    )
    both = _FRACTION in environ and _OLD_FRACTION in environ
    fraction = environ.get(_FRACTION, environ.get(_OLD_FRACTION, "0.75"))
    yield Finding(
        "memory fraction",
        fraction,
        f"unset {_OLD_FRACTION}: with {_FRACTION} beside it JAX does not start"
        if both
        else f"{_FRACTION}=0.9 where the device is yours (PyTorch's per-process fraction)",
        problem=both,
    )
    yield Finding(
        "pinned host memory",
        f"{environ.get(_PINNED, '64')} GB at the most",
        f"host placements beyond it fail: raise {_PINNED}",
    )


def _no_allocator(environ: Mapping[str, str]) -> Iterator[Finding]:
    ours = [
        name for name in (_ALLOCATOR, _PREALLOCATE, _FRACTION, _OLD_FRACTION) if name in environ
    ]
    advice = f"{', '.join(ours)}: no effect on the CPU" if ours else ""
    yield Finding("allocator", "the C library's, on the CPU", advice)
    threshold = environ.get("MALLOC_MMAP_THRESHOLD_")
    yield Finding(
        "MALLOC_MMAP_THRESHOLD_",
        threshold or "unset",
        "" if threshold else "1048576 gives large arrays back at once, so that peaks are true",
    )


def _precision(environ: Mapping[str, str], on_gpu: bool) -> Finding:
    chosen = _setting("jax_default_matmul_precision") or "default"
    override = environ.get("NVIDIA_TF32_OVERRIDE")
    value = f"matmul precision {chosen}"
    if override is not None:
        value += f", NVIDIA_TF32_OVERRIDE={override}"
    if not on_gpu:
        return Finding("TF32", value, "float32 products are exact to rounding on the CPU")
    if override == "1":
        return Finding("TF32", value, "forces TF32 on factors as well: unset it", problem=True)
    if chosen in ("default", "tensorfloat32"):
        return Finding(
            "TF32",
            value,
            "float32 products of the model may use TF32 (10 bits): fast; "
            "JAX_DEFAULT_MATMUL_PRECISION=highest where that is too little. Factors never use it",
        )
    return Finding("TF32", value, "exact, and slower than TF32 on tensor cores")


def _attention(on_gpu: bool) -> Finding:
    capability = getattr(jax.local_devices()[0], "compute_capability", None)
    if on_gpu and capability and float(capability) >= 8:
        return Finding(
            "attention",
            "jax.nn.dot_product_attention(implementation='cudnn') in half precision",
            "never forms the (queries, keys) matrix; the default chooses it where it can",
        )
    return Finding(
        "attention",
        "XLA",
        "forms the (queries, keys) matrix of every head: remat blocks of long sequences",
    )


def _host(environ: Mapping[str, str]) -> Iterator[Finding]:
    free = free_host_bytes()
    yield Finding("main memory", "unknown" if free is None else f"{bytes_text(free)} free")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    settings = [f"{name}={environ[name]}" for name in names if name in environ]
    blas = _blas_name()
    yield Finding(
        "BLAS threads",
        f"{', '.join(settings) or 'unset'}; {cores} cores; NumPy has {blas}",
        ""
        if settings
        else "the count changes the last bits of a decomposition: OPENBLAS_NUM_THREADS=1, "
        "before the first import",
    )


def _compilation(environ: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding("float64", "on" if _setting("jax_enable_x64") else "off")
    cache = _setting("jax_compilation_cache_dir")
    advice = "" if cache else "JAX_COMPILATION_CACHE_DIR=FOLDER keeps programs between runs"
    yield Finding("compilation cache", cache or "off", advice)
    if flags := environ.get("XLA_FLAGS"):
        yield Finding("XLA_FLAGS", flags)


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # JAX adds these attributes at run time


def _blas_name() -> str:
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'an unknown BLAS')} {blas.get('version', '')}".strip()


def _short(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
