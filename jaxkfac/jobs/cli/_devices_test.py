"""`train --devices` and `--mesh`: the same end as on one device, and what is said of bad ones."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli._devices import run_devices
from jaxkfac.jobs.cli._options import Experiment, TrainArguments

TINY = [
    *("--model.width", "16", "--model.hidden", "16", "--model.depth", "1"),
    *("--model.num-heads", "2", "--model.patch-size", "4", "--steps", "20"),
    *("--batch-size", "160", "--gradient-accumulation-steps", "1", "--checkpoint-every", "1"),
]


# The command line without the page: drawing it takes longer than such a run.
PROGRAM = """
import sys
from jaxkfac.jobs.cli import _train, main

_train.report_page = lambda **_: ""
sys.exit(main(sys.argv[1:]))
"""


def train(output, *words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-c", PROGRAM, "train", *TINY, "--json", "--output", str(output)]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_close(one, other, name, tolerance):
    a, b = load_checkpoint(one / name), load_checkpoint(other / name)
    assert a.step == b.step == 20
    for path, leaf in a.leaves.items():
        # The gradient of a key's bias is zero but for rounding, which AdamW divides by itself.
        if path.startswith("params/") and not (name == "adamw" and path.endswith("key/bias")):
            np.testing.assert_allclose(leaf, b.leaves[path], rtol=0, atol=tolerance, err_msg=path)
    np.testing.assert_allclose(a.records["losses"], b.records["losses"], rtol=tolerance)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    output = tmp_path_factory.mktemp("one")
    return output, train(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        # tests/eight_devices_test.py compares the same steps without the command.
        pytest.param(("--mesh", "data=4,model=2"), marks=pytest.mark.exhaustive),
        pytest.param(("--devices", "all"), marks=pytest.mark.exhaustive),
    ],
)
def test_twenty_steps_on_eight_devices_are_those_of_one(one_device, tmp_path, words):
    output, alone = one_device
    found = train(tmp_path, *words)
    for name in ("kfac", "adamw"):
        assert_close(output, tmp_path, name, 1e-5)
    axes = {"data": 8, "model": 1} if "all" in words else {"data": 4, "model": 2}
    of_one, of_many = alone["devices"]["kfac"], found["devices"]["kfac"]
    assert of_many["mesh"] == axes
    shared = of_many["bytes_per_device"] / of_one["bytes_per_device"]
    # Sides with a ones column are odd, and stay whole.
    assert shared == 1 if axes["model"] == 1 else shared < 0.8, shared


@pytest.mark.exhaustive
def test_a_run_goes_on_with_other_devices(one_device, tmp_path):
    """Each of the two checkpoints that are kept; the newest one is taken away."""
    output, _ = one_device
    shutil.copytree(output, tmp_path / "run")
    for name in ("kfac", "adamw"):
        (tmp_path / "run" / name / "20").unlink()
        assert int(load_checkpoint(tmp_path / "run" / name).step) < 20
    train(tmp_path / "run", "--resume", "--mesh", "data=4,model=2")
    for name in ("kfac", "adamw"):
        assert_close(output, tmp_path / "run", name, 1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("many", None), "--devices must be all or a number"),
        (("0", None), "--devices must be all or a number"),
        (("1", "data=2,rows=1"), "'rows=1' is none of it"),
        (("1", "data=0"), "'data=0' is none of it"),
        (("3", "data=2"), "--mesh data=2 has 2 devices, and --devices asks for 3"),
        (("1000", None), "1000 devices were asked for, and JAX finds"),
    ],
)
def test_devices_that_cannot_be_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        run_devices(TrainArguments(devices=words[0], mesh=words[1]))


def test_a_batch_that_the_devices_do_not_divide_is_refused():
    arguments = TrainArguments(Experiment(batch_size=33), devices="1", mesh="data=2")
    with pytest.raises(ValueError, match="2 devices do not divide a batch of 33 examples"):
        run_devices(arguments)
