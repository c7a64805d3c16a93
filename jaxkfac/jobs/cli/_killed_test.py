"""Runs that are killed or stopped at any moment and resumed end with the bits of a whole one."""

import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxkfac.jobs.cli._checkpoint import load_checkpoint

TRAIN = [
    *("train", "--model.width", "8", "--model.hidden", "8", "--model.depth", "1"),
    *("--model.num-heads", "2", "--model.patch-size", "4", "--epochs", "8"),
    *("--batch-size", "200", "--gradient-accumulation-steps", "2", "--checkpoint-every", "1"),
    *("--optimizer", "kfac"),
]
FINETUNE = [
    *("finetune", "--adapter.rank", "2", "--batch-size", "4", "--steps", "24"),
    *("--curvature", "None", "--samples", "0", "--questions", "0", "--checkpoint-every", "2"),
    *("--optimizer", "kfac"),
]
PAIRS = [
    *("finetune", "--preset", "wordnet-t5", "--batch-size", "16", "--steps", "24"),
    *("--samples", "0", "--generate", "0", "--checkpoint-every", "2", "--optimizer", "adafactor"),
]
# The command line with a small decoder in place of a downloaded one. Blocks that a run enters are
# written down with their seconds; one of them, where one is named, is never left.
PROGRAM = """
import contextlib
import json
import os
import signal
import sys
import threading
import time
from jaxkfac.jobs.cli import _interrupts, _progress

written, fatal, *words = sys.argv[1:]
fatal, seconds = json.loads(fatal), {}

def die():
    os.kill(os.getpid(), fatal[3])

def watched(context, counts=lambda doing: True):
    @contextlib.contextmanager
    def entered(doing):
        with context(doing) as found:
            if not counts(doing):
                yield found
                return
            entries, start = seconds.setdefault(doing, []), time.monotonic()
            entries.append(None)
            number = len(entries) - 1
            if fatal and fatal[:2] == [doing, number]:
                timer = threading.Timer(fatal[2], die)
                timer.daemon = True
                timer.start()
            try:
                yield found
            finally:
                if fatal and fatal[:2] == [doing, number] and fatal[3] == signal.SIGKILL:
                    die()
            entries[number] = time.monotonic() - start
    return entered

_progress.phase = watched(_progress.phase)
_interrupts.interrupts_deferred = watched(
    _interrupts.interrupts_deferred, lambda doing: doing.startswith("finishing")
)

from flax import nnx
import jaxkfac as jk
from jaxkfac.jobs.cli import _train, main
from jaxkfac.jobs.cli.finetune import _run
from jaxkfac.jobs.cli.finetune._run_test import CONFIG, Letters
from jaxkfac.jobs.models import Decoder, Pretrained

_train.report_page = _run.finetune_page = lambda **_: ""  # drawing takes longer than such a run
load = _run.load_model

def load_model(experiment):
    if experiment.model != "smollm2":
        return load(experiment)
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return Pretrained(CONFIG, apply_fn, params, Letters(), "models/tiny")

_run.load_model = load_model
code = main(words)
with open(written, "w") as file:
    json.dump(seconds, file)
sys.exit(code)
"""
ENDS = "writing what was trained, and the report"
COMMANDS = {  # words, the folder of checkpoints, an epoch or an update, the end
    "train": (TRAIN, "kfac", "finishing the epoch", "writing the report"),
    "pairs": (PAIRS, "checkpoints", "finishing the update", ENDS),
    "finetune": (FINETUNE, "checkpoints", "finishing the update", ENDS),
}
# The first and the last are those of the slow suite.
MOMENTS = "checkpoint compilation step end checkpoint compilation step end step checkpoint".split()


def ended(words, folder, *, fatal=None, **variables):
    """The exit code of a run, and the seconds of each of its blocks if it came to its end."""
    times = folder.with_suffix(".json")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, times, json.dumps(fatal), *words, "--output", folder],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    stopped = 0 if fatal is None or fatal[3] == signal.SIGKILL else 128 + fatal[3]
    assert done.returncode in (0, -signal.SIGKILL, stopped), done.stderr
    if stopped:
        assert "continue with: jaxkfac" in done.stderr, done.stderr
    return done.returncode, None if done.returncode else json.loads(times.read_text())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """``uninterrupted(command)``: the folder of a run, and the seconds of its blocks."""
    known = {}

    def run(command):
        if command not in known:
            folder = tmp_path_factory.mktemp(command) / "run"
            code, seconds = ended(COMMANDS[command][0], folder)
            assert code == 0
            known[command] = folder, seconds
        return known[command]

    return run


@pytest.mark.slow
@pytest.mark.sampled(2)  # one of train and one of finetune
@pytest.mark.parametrize("moment", range(len(MOMENTS)))
@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_run_that_was_killed_ends_as_one_that_was_not(uninterrupted, tmp_path, command, moment):
    """Within a random block of the moment's kind, after a random share of the block's time."""
    words, below, step, end = COMMANDS[command]
    expected, seconds = uninterrupted(command)
    draw, where = random.Random(moment), MOMENTS[moment]
    doing = {
        "checkpoint": "writing the checkpoint",  # in a thread of its own, beside the training
        "compilation": "compiling",
        "step": step,
        "end": end,
    }[where]
    number = draw.randrange(len(seconds[doing]))
    fatal = doing, number, draw.random() * seconds[doing][number], signal.SIGKILL
    # JAX writes what it has compiled in place: a kill would leave half of it to every later run.
    anew = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if where == "compilation" else {}
    killed, _ = ended(words, tmp_path / "run", fatal=fatal, **anew)
    assert killed == -signal.SIGKILL
    assert ended([*words, "--resume"], tmp_path / "run")[0] == 0
    assert_same_end(expected / below, tmp_path / "run" / below)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [3, 6])
@pytest.mark.parametrize("command", list(COMMANDS))
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_gets_a_signal_ends_what_is_under_way_and_keeps_it(
    uninterrupted, tmp_path, stop, command, number
):
    """A scheduler's SIGTERM and a terminal's SIGHUP lose no update, as Ctrl-C loses none."""
    words, below, step, _ = COMMANDS[command]
    expected, seconds = uninterrupted(command)
    fatal = step, number, 0.5 * seconds[step][number], stop
    assert ended(words, tmp_path / "run", fatal=fatal)[0] == 128 + stop
    kept, last = load_checkpoint(tmp_path / "run" / below), load_checkpoint(expected / below)
    # A signal may also come a moment after the block: then another one is ended and kept.
    ends = {round(last.step * n / len(seconds[step])) for n in range(number + 1, number + 4)}
    assert kept.step in ends
    assert ended([*words, "--resume"], tmp_path / "run")[0] == 0
    assert_same_end(expected / below, tmp_path / "run" / below)


def assert_same_end(expected, folder):
    """Two runs ended with the same bits, and the same losses on the way."""
    one, other = load_checkpoint(expected), load_checkpoint(folder)
    assert one.step == other.step and one.leaves.keys() == other.leaves.keys()
    for path, leaf in one.leaves.items():
        np.testing.assert_array_equal(other.leaves[path], leaf, err_msg=path)
    assert one.records["losses"] == other.records["losses"]
