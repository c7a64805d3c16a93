"""Checkpoints on disk: damaged or half-written; what the errors say helps."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac._errors import DamagedFileError
from jaxkfac.files import PARTIAL
from jaxkfac.jobs.cli._checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)

ABOUT = {"config": {"seed": 0}, "optimizer": "kfac", "records": {"losses": [0.5]}}


def checkpoint(step):
    leaves = {
        "params/kernel": np.full((4, 5), step, np.float32),
        "params/half": np.asarray(jnp.full((3,), step, jnp.bfloat16)),
        "optimizer/count": np.array(step),
        "optimizer/nothing": np.zeros((0, 2)),
    }
    return Checkpoint(leaves, step=step, **ABOUT)


@pytest.fixture
def folder(tmp_path):
    """A run of nine updates, with the two checkpoints that are kept."""
    for step in (3, 6, 9):
        save_checkpoint(tmp_path / "kfac", checkpoint(step))
    return tmp_path / "kfac"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_kernel(path):
    data = path.read_bytes()
    kernel = np.full((4, 5), int(path.name), np.float32).tobytes()
    assert kernel in data
    path.write_bytes(data.replace(kernel, kernel[:-1] + b"\0"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_loaded_is_what_was_saved(folder):
    found = load_checkpoint(folder.parent)
    assert found._replace(leaves={}) == checkpoint(9)._replace(leaves={})
    expected = checkpoint(9).leaves
    assert found.leaves.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found.leaves[name].dtype == leaf.dtype
        assert np.array_equal(found.leaves[name], leaf)


def test_the_newest_two_are_kept_and_what_a_killed_run_left_is_not(folder):
    (folder / f".12.0123{PARTIAL}").write_bytes(b"half of")
    assert find_checkpoint(folder).name == "9"
    save_checkpoint(folder, checkpoint(12))
    assert names(folder) == ["12", "9"]


def test_a_damaged_checkpoint_names_its_leaf_and_the_older_one(folder):
    damage_kernel(folder / "9")
    with pytest.raises(DamagedFileError) as caught:
        load_checkpoint(folder.parent)
    message = str(caught.value)
    assert f"{folder / '9'}: the array 'params/kernel' is damaged" in message
    assert f"{folder / '6'} is whole: to continue from update 6, delete {folder / '9'}" in message
    os.remove(re.search(r"delete (\S+) and run again with --resume", message)[1])
    assert load_checkpoint(folder.parent).step == 6


def test_only_a_checkpoint_that_is_whole_is_advised(folder):
    flip(folder / "9")
    flip(folder / "6")
    with pytest.raises(DamagedFileError, match="no other checkpoint.*: start again with --over"):
        load_checkpoint(folder)
    save_checkpoint(folder, checkpoint(12))
    with pytest.raises(DamagedFileError, match="12 is whole: to continue from update 12"):
        load_checkpoint(folder / "9")


@pytest.mark.parametrize("how", ["empty", "half", "folder"])
def test_what_has_the_place_of_the_newest_is_not_passed_over(folder, how):
    path = folder / "9"
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    else:
        path.write_bytes(data[: len(data) // 2] if how == "half" else b"")
    with pytest.raises(DamagedFileError, match="9 is no checkpoint.*6 is whole"):
        load_checkpoint(folder)


def test_removing_leaves_what_is_no_checkpoint(folder):
    (folder / "10").mkdir()
    (folder / "notes").write_text("mine")
    remove_checkpoints(folder)
    assert names(folder) == ["10", "notes"] and find_checkpoint(folder) is None


KILLED = """
import os, pathlib, signal, sys
import numpy as np
from jaxkfac.jobs.cli._checkpoint import Checkpoint, save_checkpoint

class Killing(dict):
    def items(self):
        yield from super().items()
        os.kill(os.getpid(), signal.SIGKILL)

leaves = Killing({"params/kernel": np.ones((300, 300))})
save_checkpoint(pathlib.Path(sys.argv[1]), Checkpoint(leaves, {}, "kfac", {}, 12))
"""


@pytest.mark.exhaustive
def test_a_checkpoint_whose_writer_was_killed_is_none(folder):
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)])
    assert done.returncode == -9
    (partial,) = set(names(folder)) - {"6", "9"}
    assert (folder / partial).stat().st_size > 300 * 300 * 8
    assert load_checkpoint(folder).step == 9
