"""One run of several processes on the loopback: the end of one process, and the same errors."""

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

from jaxkfac.jobs.cli._checkpoint import load_checkpoint
from jaxkfac.jobs.cli._paths import find_checkpoint

TRAIN = [
    *("train", "--model.width", "8", "--model.hidden", "8", "--model.depth", "1"),
    *("--model.num-heads", "2", "--model.patch-size", "4", "--optimizer", "kfac"),
    *("--batch-size", "200", "--gradient-accumulation-steps", "2", "--checkpoint-every", "1"),
]
FINETUNE = [
    *("finetune", "--adapter.rank", "2", "--batch-size", "8", "--optimizer", "kfac"),
    *("--checkpoint-every", "5", "--log-every", "5", "--sample-tokens", "2", "--questions", "2"),
    *("--samples", "1", "--steps", "20"),
]
# The command line with a small decoder, four bits a weight, in place of a downloaded one.
PROGRAM = """
import functools
import os
import resource
import sys
import jax
import optax
from flax import nnx
import jaxkfac as jk
from jaxkfac.jobs.cli import _train, main
from jaxkfac.jobs.cli.finetune import _run
from jaxkfac.jobs.cli.finetune._run_test import CONFIG, Letters
from jaxkfac.jobs.models import Decoder, Pretrained

_train.report_page = _run.finetune_page = lambda **_: ""  # drawing takes longer than such a run

def load_model(experiment):
    apply_fn, params = jk.from_nnx(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    params = jk.nf4.quantize(params, layers=".*_proj/kernel", stack=1, block=8)
    return Pretrained(CONFIG, apply_fn, params, Letters(), "models/tiny")

_run.load_model = load_model
if "ADAMW_EPS" in os.environ:  # another program of the same options
    optax.adamw = functools.partial(optax.adamw, eps=float(os.environ["ADAMW_EPS"]))
if "FILE_BYTES" in os.environ:  # the kernel's own refusal to write on
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_BYTES"]),) * 2)
sys.exit(main(sys.argv[1:]))
"""


def by_address(port, count, rank):
    return ["--coordinator", f"localhost:{port}", "--processes", count, "--process", rank], {}


class Run:
    """A run of so many processes with so many devices each.

    Args:
        folder: For what they print.
        words: Of the command; where they differ from process to process, one list for each.
        count: Processes; one is started without ``--coordinator``.
        devices: Of each process.
        folders: In which each process runs.
        variables: Of the environment of process 0 alone.
        join: ``join(port, count, rank)``: words and variables by which a process finds the others.
    """

    def __init__(
        self, folder, words, *, count=2, devices=1, folders=None, variables=None, join=by_address
    ):
        folder.mkdir(exist_ok=True)
        self.folder, self.count = folder, count
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        if count > 1:  # one thread for what is exchanged (docs/devices.md)
            environment["PJRT_NPROC"] = "1"
        self.processes = []
        for rank in range(count):
            own = words[rank] if isinstance(words[0], list) else words
            joined, told = join(str(port), str(count), str(rank)) if count > 1 else ([], {})
            with self._file("out", rank).open("w") as out, self._file("err", rank).open("w") as err:
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *own, *joined],
                    cwd=folders and folders[rank],
                    env=environment | told | ((not rank and variables) or {}),
                    stdout=out,
                    stderr=err,
                )
            self.processes.append(process)

    def _file(self, name, rank):
        return self.folder / f"{name}.{rank}"

    def said(self, rank):
        return self._file("err", rank).read_text()

    def wait_for(self, path):
        """Until there is a file."""
        while not path.exists():
            assert all(process.poll() is None for process in self.processes), self.said(0)
            time.sleep(0.01)

    def codes(self, seconds=300):
        """The exit codes, once all have ended."""
        end = time.monotonic() + seconds
        try:
            return [p.wait(max(1, end - time.monotonic())) for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def summary(self):
        """What process 0 has printed; the others print nothing."""
        assert self.codes() == [0] * self.count, [self.said(i) for i in range(self.count)]
        lines = [line for line in self._file("out", 0).read_text().splitlines() if line[:1] == "{"]
        assert not any("{" in self._file("out", i).read_text() for i in range(1, self.count))
        return json.loads(lines[-1])


def assert_same_end(one, other, *, tolerance):
    a, b = load_checkpoint(one), load_checkpoint(other)
    assert a.step == b.step and a.leaves.keys() == b.leaves.keys()
    for path, leaf in a.leaves.items():
        if path.startswith("params/"):
            np.testing.assert_allclose(b.leaves[path], leaf, rtol=0, atol=tolerance, err_msg=path)
    np.testing.assert_allclose(b.records["losses"], a.records["losses"], rtol=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "devices", "mesh"),
    [(1, 8, "data=4,model=2"), (4, 1, "data=4"), (2, 2, "data=2,model=2")],
)
@pytest.mark.parametrize(("command", "below"), [(TRAIN, "kfac"), (FINETUNE, "checkpoints")])
def test_twenty_steps_of_several_processes_or_devices_are_those_of_one(
    tmp_path, command, below, count, devices, mesh
):
    """Of ``finetune`` the base is in four bits, and lies over ``model`` or ``data``."""
    words = [*command, "--json", "--steps", "20"]
    one, many = tmp_path / "one", tmp_path / "many"
    alone = Run(tmp_path / "1", [*words, "--output", str(one)], count=1).summary()
    run = Run(
        tmp_path / "n",
        [*words, "--mesh", mesh, "--output", str(many)],
        count=count,
        devices=devices,
    )
    found = run.summary()
    assert_same_end(one / below, many / below, tolerance=1e-5)
    metrics = json.loads((many / "metrics.json").read_text())
    assert (many / "report.html").exists() and metrics["devices"] == found["devices"]
    assert metrics["samples_per_second"]
    kept, of_one = (x["devices"].get("kfac", x["devices"]) for x in (found, alone))
    named = dict(part.split("=") for part in mesh.split(","))
    assert kept["mesh"] == {axis: int(named.get(axis, 1)) for axis in ("data", "model")}
    if command is FINETUNE or "model" in named:
        assert kept["bytes_per_device"] < of_one["bytes_per_device"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [2, 4])
def test_where_a_process_is_killed_the_others_say_so_and_all_go_on(tmp_path, count):
    words = [*TRAIN, "--devices", "all", "--epochs", "12", "--json"]
    one, two = tmp_path / "one", tmp_path / "two"
    Run(tmp_path / "1", [*words, "--output", str(one)], count=count).summary()
    run = Run(tmp_path / "2", [*words, "--output", str(two)], count=count)
    run.wait_for(two / "kfac" / "6")
    run.processes[-1].kill()
    *codes, killed = run.codes(seconds=120)
    assert killed == -signal.SIGKILL
    for rank, code in enumerate(codes):
        assert code not in (0, -signal.SIGKILL)
        # Ours, an exception's or, where gloo ends the process in the midst of a sum, gloo's.
        messages = "could not exchange with the others", "Error", "enforce fail"
        assert any(message in run.said(rank) for message in messages), run.said(rank)
    Run(tmp_path / "3", [*words, "--output", str(two), "--resume"], count=count).summary()
    assert_same_end(one / "kfac", two / "kfac", tolerance=0)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("data=4,model=2", None), (None, "data=2,model=2")])
def test_a_finetuning_that_is_killed_goes_on_with_other_devices(tmp_path, first, then):
    """In single precision, damped so that rounding is not magnified (1e-7 here, 1.2e-6 at 1e-4)."""
    run = lambda name, mesh, *words: Run(
        tmp_path / f"{name}'s output",
        [
            *FINETUNE,
            "--kfac.damping",
            "1e-2",
            "--json",
            *words,
            *(("--mesh", mesh) if mesh else ()),
        ],
        count=1,
        devices=8 if mesh else 1,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    run("one", None, "--output", str(one)).summary()
    killed = run("two", first, "--output", str(two))
    killed.wait_for(two / "checkpoints" / "5")
    killed.processes[0].kill()
    assert killed.codes() == [-signal.SIGKILL]
    run("two", then, "--output", str(two), "--resume").summary()
    assert_same_end(one / "checkpoints", two / "checkpoints", tolerance=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(tmp_path, stop, count):
    words = [*TRAIN, "--devices", "all", "--epochs", "400", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", [*words, "--checkpoint-every", "3"], count=count)
    run.wait_for(tmp_path / "run" / "kfac" / "9")
    run.processes[1].send_signal(stop)
    sent = time.monotonic()
    assert run.codes() == [128 + stop] * count, (run.said(0), run.said(1))
    assert time.monotonic() - sent < 30
    assert "continue with: jaxkfac train" in run.said(0)
    stored = load_checkpoint(tmp_path / "run" / "kfac")
    assert 9 <= stored.step < 1200 and len(stored.records["losses"]) == stored.step


@pytest.mark.exhaustive
def test_a_signal_stops_a_finetuning_of_two_processes_between_two_readings(tmp_path):
    words = [*FINETUNE, "--devices", "all", "--steps", "100000", "--log-every", "100000"]
    words += ["--checkpoint-every", "3", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", words)
    run.wait_for(tmp_path / "run" / "checkpoints" / "6")
    run.processes[1].send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert run.codes(120) == [128 + signal.SIGTERM] * 2, (run.said(0), run.said(1))
    assert time.monotonic() - sent < 30
    assert "continue with: jaxkfac finetune" in run.said(0)
    stored = load_checkpoint(tmp_path / "run" / "checkpoints")
    assert 6 <= stored.step < 100000 and len(stored.records["losses"]) == stored.step


@pytest.mark.exhaustive
def test_a_checkpoint_that_one_process_cannot_write_stops_both(tmp_path):
    words = [*TRAIN, "--devices", "all", "--epochs", "4", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", words, variables={"FILE_BYTES": "10000"})
    assert run.codes() == [2, 2], (run.said(0), run.said(1))
    assert "the checkpoint of update 3 could not be saved" in run.said(0)
    assert "process 0 failed with OSError" in run.said(1)
    assert "the checkpoint of update 3 could not be saved" in run.said(1)
    assert find_checkpoint(tmp_path / "run" / "kfac") is None


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("seed", marks=pytest.mark.exhaustive), "command"])
def test_processes_with_other_options_or_programs_end_at_once(tmp_path, what):
    words = [*TRAIN, "--devices", "all", "--output", str(tmp_path / "run")]
    other = {
        "seed": [*words, "--seed", "1"],
        "command": [*FINETUNE, "--devices", "all", "--output", str(tmp_path / "run")],
    }[what]
    run = Run(tmp_path / "p", [words, other])
    assert run.codes() == [2, 2], (run.said(0), run.said(1))
    for rank in range(2):
        assert "comparing options: processes [0] and [1] do not have the same" in run.said(rank)
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_process_with_another_program_ends_all_before_a_step(tmp_path):
    words = ["adamw" if word == "kfac" else word for word in TRAIN]
    words += ["--devices", "all", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", words, variables={"ADAMW_EPS": "0.125"})
    assert run.codes(120) == [2, 2], (run.said(0), run.said(1))
    for rank in range(2):
        assert "compiling: processes [0] and [1] do not have the same" in run.said(rank)
    assert find_checkpoint(tmp_path / "run" / "adamw") is None


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_without_data_ends_all(tmp_path):
    """Process 1 runs in a folder that has no such file."""
    record = {"prompt": "H is", "completion": " hydrogen"}
    (tmp_path / "records.jsonl").write_text((json.dumps(record) + "\n") * 8)
    (tmp_path / "empty").mkdir()
    words = [*FINETUNE, "--data", "records.jsonl", "--devices", "all", "--output", "run"]
    run = Run(tmp_path / "p", words, folders=[tmp_path, tmp_path / "empty"])
    assert run.codes() == [2, 2], (run.said(0), run.said(1))
    assert "reading the data: process 1 failed with FileNotFoundError" in run.said(0)
    assert "records.jsonl" in run.said(1)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_process_must_have_work(tmp_path):
    words = [*TRAIN, "--devices", "2", "--output", str(tmp_path / "run")]
    run = Run(tmp_path / "p", words, devices=2)
    assert run.codes() == [2, 2], (run.said(0), run.said(1))
    assert "2 of the 4 devices of all processes were asked for" in run.said(1)
