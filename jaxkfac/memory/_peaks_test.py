"""Loading and casting in a fresh process: the tree and little more is ever resident."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from jaxkfac.memory import _budget as resident

MIB = 2**20
SIZES_MIB = [12, 32, 12, 12, 12, 12, 12, 12]  # 116 in float32; the largest is not the first
LARGEST = 32

PROBE = """
import gc, json, sys
import jax, jax.numpy as jnp
from jaxkfac.memory import cast_once, load_safetensors, track

def peak(work):
    gc.collect()
    with track("") as stage:
        out = jax.block_until_ready(work())
    assert stage.resident_peak.exact
    return out, (stage.resident_peak.nbytes - stage.resident_before) / 2**20

small, large = sys.argv[1:]
cast_once(load_safetensors(small), "bfloat16")  # what the first call costs, it costs once
load_safetensors(small, dtype="bfloat16")
found = {}
_, found["converted"] = peak(lambda: load_safetensors(large, dtype="bfloat16"))
params, found["loaded"] = peak(lambda: load_safetensors(large))
params, found["cast"] = peak(lambda: cast_once(params, "bfloat16"))
params, found["back"] = peak(lambda: cast_once(params, "float32"))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_peaks_are_the_tree_and_one_leaf(tmp_path):
    if not resident.lower_mark():
        pytest.skip("this system keeps no high-water mark that can be lowered")
    for name, unit in (("small", 1024), ("large", MIB)):
        tensors = {f"x{i}": np.ones(n * unit // 4, np.float32) for i, n in enumerate(SIZES_MIB)}
        safetensors.numpy.save_file(tensors, tmp_path / f"{name}.safetensors")
    # Freed arrays go back to the system at once; without it glibc keeps some of them.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "JAX_PLATFORMS": "cpu"}
    files = [str(tmp_path / f"{name}.safetensors") for name in ("small", "large")]
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *files], env=env, capture_output=True, text=True, check=True
    )
    peaks, total = json.loads(run.stdout), sum(SIZES_MIB)
    bounds = {
        "loaded": total + 0.1 * LARGEST,  # no second copy of even one tensor
        "converted": total / 2 + 1.1 * LARGEST,
        "cast": 1.1 * LARGEST / 2,  # beyond the float32 tree that it began with
        "back": total / 2 + 1.1 * LARGEST / 2,  # beyond the bfloat16 one
    }
    assert {name for name in bounds if peaks[name] > bounds[name]} == set(), peaks
    assert peaks["loaded"] > 0.95 * total  # what is measured is there


DEVICE_PROBE = """
import sys, jax
from jaxkfac.memory import load_safetensors

file, dtype = sys.argv[1:]
device = jax.devices("gpu")[0]
params = jax.block_until_ready(load_safetensors(file, dtype=dtype, sharding=device))
print(device.memory_stats()["peak_bytes_in_use"])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaks_on_a_gpu_are_the_tree_and_one_tensor(tmp_path, dtype):
    file = tmp_path / "model.safetensors"
    tensors = {f"x{i}": np.ones(n * MIB // 4, np.float32) for i, n in enumerate(SIZES_MIB)}
    safetensors.numpy.save_file(tensors, file)
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(
        [sys.executable, "-c", DEVICE_PROBE, str(file), dtype],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    total = sum(SIZES_MIB) / (1 if dtype == "float32" else 2)
    assert total <= int(run.stdout) / MIB <= total + 1.1 * LARGEST
