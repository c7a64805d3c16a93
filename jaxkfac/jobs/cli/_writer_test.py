"""Checkpoints that are written beside the training: order, errors, interrupts."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from jaxkfac.jobs.cli import _checkpoint
from jaxkfac.jobs.cli._checkpoint import (
    Checkpoint,
    checkpoint_writer,
    find_checkpoint,
    load_checkpoint,
)
from jaxkfac.jobs.cli._interrupts import Hold

WHOLE = _checkpoint.save_checkpoint


def checkpoint(step):
    leaves = {"params/kernel": np.full((4, 5), step, np.float32)}
    return Checkpoint(leaves, {"seed": 0}, "kfac", {"losses": []}, step)


@pytest.fixture
def held(monkeypatch):
    """``held`` is an event: nothing is written before it is set."""
    go_on = threading.Event()

    def save(folder, stored):
        assert go_on.wait(20)
        return WHOLE(folder, stored)

    monkeypatch.setattr(_checkpoint, "save_checkpoint", save)
    return go_on


def test_training_goes_on_while_a_checkpoint_is_written(held, tmp_path):
    with checkpoint_writer() as writer:
        writer.save(tmp_path / "kfac", checkpoint(3))
        assert find_checkpoint(tmp_path / "kfac") is None
        held.set()
    assert load_checkpoint(tmp_path / "kfac").step == 3


def test_the_next_checkpoint_waits_for_the_one_before(held, tmp_path):
    with checkpoint_writer() as writer:
        writer.save(tmp_path, checkpoint(3))
        threading.Timer(0.05, held.set).start()
        writer.save(tmp_path, checkpoint(6))
        assert (tmp_path / "3").exists()
    assert load_checkpoint(tmp_path).step == 6


def test_what_fails_beside_the_training_is_raised_by_it(monkeypatch, tmp_path):
    written = []

    def fail(folder, stored):
        written.append(stored.step)
        raise OSError(28, "the checkpoint could not be saved")

    def train():
        with checkpoint_writer() as writer:
            writer.save(tmp_path, checkpoint(3))
            writer.wait()
            assert isinstance(writer.error, OSError)
            writer.save(tmp_path, checkpoint(6))

    monkeypatch.setattr(_checkpoint, "save_checkpoint", fail)
    with pytest.raises(OSError, match="could not be saved"):
        train()
    assert written == [3]


def test_ctrl_c_waits_until_the_checkpoint_is_on_the_disk(monkeypatch, tmp_path, capsys):
    def press_and_save(folder, stored):
        while not isinstance(signal.getsignal(signal.SIGINT), Hold):  # until it is waited for
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        return WHOLE(folder, stored)

    def train():
        with checkpoint_writer() as writer:
            writer.save(tmp_path, checkpoint(3))

    monkeypatch.setattr(_checkpoint, "save_checkpoint", press_and_save)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert load_checkpoint(tmp_path).step == 3
    assert "writing the checkpoint, then stopping" in capsys.readouterr().err
