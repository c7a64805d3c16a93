"""Several processes on the loopback: the same results in each, and errors where one is missing."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "PJRT_NPROC": "1",  # the order of what is exchanged (docs/devices.md); cores are divided, too
}


def _start(name, count, folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests._process_programs", name, str(port), str(count)]
    processes = []
    for rank in range(count):  # files: a full pipe would keep one from ending, and the others wait
        with (folder / f"out.{rank}").open("w") as out, (folder / f"err.{rank}").open("w") as err:
            process = subprocess.Popen(
                [*command, str(rank), str(folder)],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                stdout=out,
                stderr=err,
            )
        processes.append(process)
    return processes


def ended(name, count, folder, *, within=120):
    """``(exit code, standard output, standard error)`` of each process, all within so many s."""
    processes, end = _start(name, count, folder), time.monotonic() + within
    try:
        codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    read = lambda name, rank: (folder / f"{name}.{rank}").read_text()
    return [(code, read("out", rank), read("err", rank)) for rank, code in enumerate(codes)]


def run(name, count, folder):
    """What each process has found, however long a loaded machine takes to compile for all."""
    results = ended(name, count, folder, within=400)
    said = "".join(
        f"\n==== process {rank} ended with {code}:\n{error}"
        for rank, (code, _, error) in enumerate(results)
    )
    assert not any(code for code, _, _ in results), said
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]  # gloo prints a line too


@functools.cache
def _one_process(name, folder):
    (found,) = run(name, 1, folder)
    return found


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return lambda name: _one_process(name, folder)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if isinstance(values, dict):
            assert_same(found[name], values)
        elif name != "cubes":
            scale = np.abs(values).max()
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-12 * scale)


def saved_arrays(path):
    """The bytes of a saved service's arrays; the file also says when it was written."""
    with np.load(path) as stored:
        return {name: stored[name].tobytes() for name in stored.files if name != "manifest.json"}


COUNTS = [2, pytest.param(4, marks=pytest.mark.exhaustive)]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_each_process_decomposes_its_share_and_has_all_bases(tmp_path, one_process, count):
    """Of factors that are whole in each process, sharded over them, or under a byte budget."""
    expected, found = one_process("host"), run("host", count, tmp_path)
    for each in found:
        assert_same(each, expected)
        assert {**each, "cubes": 0} == {**found[0], "cubes": 0}  # to the last bit
    saved = [saved_arrays(tmp_path / str(process)) for process in range(count)]
    assert saved[0] and saved == saved[:1] * count
    cubes = [sum(each["cubes"]) for each in found]
    assert sum(cubes) == sum(expected["cubes"])
    refreshes = 3  # each has its share and at most the largest matrix
    assert max(cubes) <= sum(cubes) / count + refreshes * max(expected["cubes"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", COUNTS)
def test_kfac_in_the_graph_is_that_of_one_process(tmp_path, one_process, count):
    """As it is, with divided refreshes, with all that is kept divided, and adapting itself."""
    expected, found = one_process("kfac"), run("kfac", count, tmp_path)
    assert found == found[:1] * count
    assert_same(found[0], expected)
    exact = (expected[name] for name in ("whole", "divided", "sharded", "sharded and divided"))
    for each in exact:
        assert_same(each, expected["whole"])
    assert_same(expected["adaptive, sharded"], expected["adaptive"])


@pytest.mark.slow
def test_a_matrix_that_fails_in_one_process_is_named_in_all(tmp_path):
    first, second = run("not_finite", 2, tmp_path)
    assert first == second
    assert "factor A of layer 'wide' holds 49 NaN" in first["error"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_base_that_lies_over_the_processes_can_be_closed_over(tmp_path):
    for found in run("closed_over", 2, tmp_path):
        assert found == {"layers": ["down", "up"], "uncovered": 0}


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_process_that_feeds_another_batch_is_refused_in_all(tmp_path, count):
    for said in run("first_batches", count, tmp_path):
        assert said["the same"] == said["rows of its own"] == ""
        assert said["other values"].startswith("the first batch, its values: processes [0] and")
        assert said["a row more"].startswith("the first batch, its structure, shapes and dtypes:")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_processes_with_other_options_are_told_so(tmp_path):
    for found in run("disagree", 2, tmp_path):
        assert "refresh at step 0: processes [0] and [1] do not have the same" in found["error"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_without_data_is_not_waited_for_for_ever(tmp_path):
    code, _, error = ended("silent", 2, tmp_path)[0]
    assert code != 0
    assert "TimeoutError: waited 3 s for the other processes" in error


@pytest.mark.exhaustive  # _several_processes_test of the command line kills one too
@pytest.mark.parametrize("count", COUNTS)
def test_the_others_end_with_a_message_where_one_is_killed(tmp_path, count):
    *others, (killed, _, _) = ended("killed", count, tmp_path)
    assert killed == -signal.SIGKILL
    for code, _, error in others:
        assert code != 0 and "Error" in error
