"""Processes of a script that join by ``join_processes`` end together, also where one fails."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys
import time
import jaxkfac as jk

rank, port = int(sys.argv[1]), sys.argv[2]
jk.join_processes(f"localhost:{port}", num_processes=2, process_id=rank)

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2,), ("data",))
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
for i in range(100_000):
    if rank == 1 and i == 20:
        print("raised at", time.time(), file=sys.stderr, flush=True)
        raise ValueError("row 7 cannot be read")
    rows = np.ones((4, 3), np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
    total(x).block_until_ready()
"""


@pytest.mark.exhaustive
def test_a_process_that_raises_in_its_input_ends_all_within_a_minute(tmp_path):
    """With JAX's own limits both ended after 357 seconds."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PJRT_NPROC": "2"}
    environment = os.environ | variables | {"PYTHONPATH": str(Path(__file__).parents[2])}
    said = [tmp_path / "0", tmp_path / "1"]
    processes = []
    for rank, path in enumerate(said):
        with path.open("w") as file:
            words = [sys.executable, "-c", PROGRAM, str(rank), port]
            processes.append(subprocess.Popen(words, env=environment, stdout=file, stderr=file))
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = time.time()
    assert 0 not in codes
    texts = [path.read_text() for path in said]
    assert "row 7 cannot be read" in texts[1]
    assert "processes on CPUs exchange through gloo" in texts[0]
    assert "processes on CPUs exchange through gloo" not in texts[1]
    raised = float(texts[1].partition("raised at ")[2].split()[0])
    assert ended - raised < 60
