"""Settings that would go wrong are problems, and say what to change."""

import os
import types

import jax
import pytest

from jaxkfac.memory import _environment as environment
from jaxkfac.memory import inspect_environment


def by_topic(environ):
    return {finding.topic: finding for finding in inspect_environment(environ)}


@pytest.fixture
def _gpu(monkeypatch):
    """A GPU as its client describes it; the real one is looked at by the test marked gpu."""
    stats = {"bytes_limit": 32 * 2**30, "bytes_in_use": 2**30, "peak_bytes_in_use": 2**31}
    device = types.SimpleNamespace(
        platform="gpu",
        id=0,
        device_kind="NVIDIA something",
        compute_capability="9.0",
        memory_stats=lambda: stats,
        addressable_memories=lambda: [types.SimpleNamespace(kind="pinned_host")],
    )
    monkeypatch.setattr(environment.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(environment.jax, "local_devices", lambda: [device])


def test_cpu_says_what_counts_there():
    if jax.default_backend() != "cpu":
        pytest.skip("this is about the CPU")
    found = by_topic({"XLA_CLIENT_MEM_FRACTION": "0.9"})
    assert found["allocator"].advice == "XLA_CLIENT_MEM_FRACTION: no effect on the CPU"
    assert "1048576" in found["MALLOC_MMAP_THRESHOLD_"].advice
    assert "OPENBLAS_NUM_THREADS=1" in found["BLAS threads"].advice
    assert "exact to rounding" in found["TF32"].advice
    assert by_topic({"OPENBLAS_NUM_THREADS": "1"})["BLAS threads"].advice == ""
    assert not any(finding.problem for finding in found.values())


def test_a_gpu_that_is_meant_and_missing_is_a_problem():
    if jax.default_backend() != "cpu":
        pytest.skip("this is about a machine without a GPU")
    finding = by_topic({"JAX_PLATFORMS": "cuda,cpu"})["backends"]
    assert finding.problem and 'pip install "jaxkfac[gpu]"' in finding.advice


@pytest.mark.usefixtures("_gpu")
def test_gpu_settings_are_read_and_their_counterparts_named():
    found = by_topic({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "JAX_PLATFORMS": ""})
    assert "31 GiB of 32 GiB free, peak 2 GiB" in found["device gpu:0"].value
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async" in found["allocator"].advice
    assert found["preallocation"].value == "on" and "PREALLOCATE" in found["preallocation"].advice
    assert found["memory fraction"].value == "0.75"
    assert "cudnn" in found["attention"].value and "TF32 (10 bits)" in found["TF32"].advice
    off = by_topic({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NVIDIA_TF32_OVERRIDE": "1"})
    assert off["preallocation"].value == "off" and off["TF32"].problem


@pytest.mark.usefixtures("_gpu")
def test_both_names_of_the_fraction_are_a_problem():
    both = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_CLIENT_MEM_FRACTION": "0.9"}
    finding = by_topic(both)["memory fraction"]
    assert finding.problem and "unset XLA_PYTHON_CLIENT_MEM_FRACTION" in finding.advice


@pytest.mark.usefixtures("_gpu")
def test_a_missing_cpu_backend_is_a_problem(monkeypatch):
    def no_cpu(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(environment.jax, "devices", no_cpu)
    finding = by_topic({"JAX_PLATFORMS": "cuda"})["backends"]
    assert finding.problem and "JAX_PLATFORMS=cuda,cpu" in finding.advice


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("", "none seen"),
        (f"{os.getpid()}, 512 MiB\n", "none seen"),
        (f"{os.getpid()}, 512 MiB\n7, 9000 MiB\n", "7 (9000 MiB)"),
        (None, "unknown"),
    ],
    ids=["nobody", "this one", "another", "no driver"],  # a PID is another one in each worker
)
def test_other_processes_on_the_gpu_are_those_of_the_driver_but_this_one(
    monkeypatch, rows, expected
):
    def run(query, **_):
        if rows is None:
            raise FileNotFoundError(query[0])
        return types.SimpleNamespace(stdout=rows)

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert by_topic({})["other processes"].value == expected


@pytest.mark.gpu
def test_a_gpu_is_described():
    found = by_topic({})
    (device,) = [f for topic, f in found.items() if topic.startswith("device gpu:0")]
    assert "free, peak" in device.value and "sm " in device.value
