"""The few-shot job: what its author asked of it, and a run that was killed and resumed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxkfac.files import Archive
from jaxkfac.memory import resident_bytes

SCRIPT = Path(__file__).parent.parent / "examples" / "fewshot.py"
SMALL = [
    *("--n-way", "3", "--k-shot", "1", "--n-query", "2", "--n-episode", "6", "--epochs", "4"),
    *("--width", "4", "--n-test", "20", "--gradient-accumulation-steps", "4"),
]  # an epoch ends within a group of micro-batches


# The job in a process that notes what it holds at the end of each epoch.
PROBE = """
import ctypes, gc, importlib.util, json, sys, tracemalloc

import jax

from jaxkfac.memory import resident_bytes

script, output, *words = sys.argv[1:]
spec = importlib.util.spec_from_file_location("fewshot", script)
job = importlib.util.module_from_spec(spec)
spec.loader.exec_module(job)
save, found = job.save, []

def noted(*arguments):
    save(*arguments)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps for later is not held
    arrays = sum(x.nbytes for x in jax.live_arrays())
    if len(found) == 1:  # every program is compiled now, and objects are few
        tracemalloc.start()
    objects = tracemalloc.get_traced_memory()[0]
    found.append({"arrays": arrays, "objects": objects, "resident": resident_bytes()})

job.save = noted
sys.argv = ["fewshot.py", *words, "--output", output]
job.main()
print(json.dumps(found))
"""


def command(*words):
    return [sys.executable, str(SCRIPT), *SMALL, *map(str, words)]


def run(*words):
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=600)


def killed_after_a_checkpoint(*words, checkpoint):
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    said, _ = process.communicate()
    assert checkpoint.exists(), said.decode()


def stored(path):
    with Archive(path, "jaxkfac.example.fewshot", "checkpoint") as archive:
        return {name: archive.read(name) for name in archive.names}, archive.about["records"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adam", "kfac"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path, optimizer):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run("--optimizer", optimizer, "--output", whole)
    assert done.returncode == 0, done.stderr
    words = ("--optimizer", optimizer, "--output", cut)
    killed_after_a_checkpoint(*words, checkpoint=cut / "checkpoint")
    assert len(stored(cut / "checkpoint")[1]["losses"]) < 4
    done = run(*words, "--resume")
    assert done.returncode == 0, done.stderr
    (expected, records), (found, others) = stored(whole / "checkpoint"), stored(cut / "checkpoint")
    assert found.keys() == expected.keys() and others == records
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    one, other = (json.loads((p / "records.json").read_text()) for p in (whole, cut))
    assert one == other and 0 <= one["novel"] <= 1


@pytest.fixture(scope="module")
def five_epochs(tmp_path_factory):
    """A run of five epochs: what it printed, what it held after each, and its folder."""
    output = tmp_path_factory.mktemp("five") / "run"
    words = [str(SCRIPT), str(output), *SMALL, "--epochs", "5", "--n-test", "2"]
    # Large pieces go back to the system at once, so that a pool of them is not counted.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    *lines, memory = done.stdout.splitlines()
    return lines, json.loads(memory), output


@pytest.mark.slow
def test_the_time_left_is_said_within_the_first_epoch(five_epochs):
    lines, _, output = five_epochs
    left, first, *_ = [x for x in lines if " left " in x or x[:5] == "epoch"]
    assert "of training left" in left and "24 episodes)" in left and first.startswith("epoch   1")
    records = json.loads((output / "records.json").read_text())
    assert len(records["losses"]) == len(records["validation"]) == 5
    assert any(f"{records['novel']:.2%}" in x for x in lines) and records["episodes"] == 2


@pytest.mark.slow
@pytest.mark.skipif(resident_bytes() is None, reason="resident memory is read from /proc")
def test_an_epoch_holds_no_more_memory_than_the_one_before_it(five_epochs):
    _, (_, second, third, *later), _ = five_epochs
    episode = 3 * (1 + 2) * 28 * 28 * 4  # bytes of its images
    for number, epoch in enumerate(later, 1):
        assert epoch["arrays"] == second["arrays"], "arrays of JAX"
        # The third epoch is the first whose objects were all noted; less than an episode may stay.
        grown = epoch["objects"] - third["objects"]
        assert third["objects"] > 0 and grown < number * episode, "objects of Python and NumPy"
        assert epoch["resident"] <= 1.01 * second["resident"], "resident memory"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_cannot_be_gone_on_with_is_said(tmp_path):
    assert run("--output", tmp_path, "--epochs", "1").returncode == 0
    again = run("--output", tmp_path)
    assert again.returncode == 1 and "go on with --resume" in again.stderr
    other = run("--output", tmp_path, "--resume", "--rate", "0.5")
    assert other.returncode == 1 and "--rate was 0.001" in other.stderr
    many = run("--n-way", "15", "--output", tmp_path / "other")
    assert many.returncode == 1 and "n_way=15: glyphs (validation) has 10 classes" in many.stderr


@pytest.mark.exhaustive
def test_images_that_cannot_be_used_are_named(tmp_path):
    image = pytest.importorskip("PIL.Image")
    # no class may be in two splits
    for split, names in {"train": "abc", "validation": "def", "novel": "ghi"}.items():
        for name in names:
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    words = ("--data", tmp_path / "data", "--image-size", "16", "--output", tmp_path / "out")
    few = tmp_path / "data" / "train" / "b" / "2.png"
    kept = few.read_bytes()
    few.unlink()
    done = run(*words)
    assert done.returncode == 1 and "class 'b' has 2, but" in done.stderr
    few.write_bytes(kept[:20])
    done = run(*words)
    assert done.returncode == 1 and "b/2.png does not decode" in done.stderr


@pytest.mark.exhaustive
def test_the_plan_is_printed_before_anything_is_loaded(tmp_path):
    done = run("--plan", "--data", tmp_path / "nowhere")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout and "activations" in done.stdout
