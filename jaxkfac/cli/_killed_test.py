"""Runs that are killed at any moment and resumed end with the bits of one that was not."""

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxkfac.cli._checkpoint import load_checkpoint

TRAIN = [
    *("train", "--model.width", "8", "--model.hidden", "8", "--model.depth", "1"),
    *("--model.num-heads", "2", "--model.patch-size", "4", "--epochs", "8"),
    *("--batch-size", "200", "--gradient-accumulation-steps", "2", "--checkpoint-every", "1"),
    *("--optimizer", "kfac"),
]
FINETUNE = [
    *(
        "finetune",
        "--adapter.rank",
        "2",
        "--batch-size",
        "4",
        "--steps",
        "24",
        "--curvature",
        "None",
    ),
    *("--samples", "0", "--questions", "0", "--checkpoint-every", "2", "--optimizer", "kfac"),
]
PAIRS = [
    *("finetune", "--preset", "wordnet-t5", "--batch-size", "16", "--steps", "24"),
    *("--samples", "0", "--generate", "0", "--checkpoint-every", "2", "--optimizer", "adafactor"),
]
# The command line with a small decoder in place of a downloaded one.
PROGRAM = """
import sys
import jax
from flax import nnx
import jaxkfac as jk
from jaxkfac.cli import main
from jaxkfac.cli.finetune import _run
from jaxkfac.cli.finetune._run_test import CONFIG, Letters
from jaxkfac.models import Decoder, Pretrained

load = _run.load_model

def load_model(experiment):
    if experiment.model != "smollm2":
        return load(experiment)
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, params, Letters(), "models/tiny")

_run.load_model = load_model
sys.exit(main(sys.argv[1:]))
"""
COMMANDS = {
    "train": (TRAIN, "kfac"),
    "pairs": (PAIRS, "checkpoints"),
    "finetune": (FINETUNE, "checkpoints"),
}


def has_ended(words, *, after=None):
    """Whether the run came to its end; killed where that takes longer than ``after`` seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        _, error = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert process.returncode == 0, error.decode()
    return True


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """``uninterrupted(command)``: the folder of a run, and how long it took."""
    known = {}

    def run(command):
        if command not in known:
            words, _ = COMMANDS[command]
            output = tmp_path_factory.mktemp(command)
            has_ended([*words, "--output", str(output / "warm")])  # fills the cache of programs
            start = time.monotonic()
            has_ended([*words, "--output", str(output / "run")])
            known[command] = output / "run", time.monotonic() - start
        return known[command]

    return run


MOMENTS = [random.Random(i).random() for i in range(10)]  # shares of the time of a run


@pytest.mark.slow
@pytest.mark.sampled(2)  # one of train and one of finetune
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_run_that_was_killed_ends_as_one_that_was_not(uninterrupted, tmp_path, command, moment):
    words, below = COMMANDS[command]
    expected, seconds = uninterrupted(command)
    words = [*words, "--output", str(tmp_path)]
    if not has_ended(words, after=moment * seconds):
        assert has_ended([*words, "--resume"])
    one, other = load_checkpoint(expected / below), load_checkpoint(tmp_path / below)
    assert one.step == other.step and one.leaves.keys() == other.leaves.keys()
    for path, leaf in one.leaves.items():
        np.testing.assert_array_equal(other.leaves[path], leaf, err_msg=path)
    assert one.records["losses"] == other.records["losses"]
