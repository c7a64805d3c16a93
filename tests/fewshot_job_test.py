"""The few-shot job: killed and resumed it ends with the bits of one that was not."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxkfac.files import Archive

SCRIPT = Path(__file__).parent.parent / "examples" / "fewshot.py"
SMALL = [
    *("--n-way", "3", "--k-shot", "1", "--n-query", "2", "--n-episode", "6", "--epochs", "4"),
    *("--width", "4", "--n-test", "20", "--gradient-accumulation-steps", "4"),
]  # an epoch ends within a group of micro-batches


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


@pytest.mark.slow
def test_the_time_left_is_said_within_the_first_epoch(tmp_path):
    done = run("--output", tmp_path, "--epochs", "2", "--n-test", "2")
    assert done.returncode == 0, done.stderr
    left, first, *_ = [x for x in done.stdout.splitlines() if " left " in x or x[:5] == "epoch"]
    assert "of training left" in left and "6 episodes)" in left and first.startswith("epoch   1")
    records = json.loads((tmp_path / "records.json").read_text())
    assert len(records["losses"]) == len(records["validation"]) == 2
    assert f"{records['novel']:.2%}" in done.stdout and records["episodes"] == 2


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_plan_is_printed_before_anything_is_loaded(tmp_path):
    done = run("--plan", "--data", tmp_path / "nowhere", "--backbone", "resnet10")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout and "activations" in done.stdout
