"""Eight devices in one process: as on one, data parallel, fully sharded and divided."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def run(name):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests._device_programs", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def layouts():
    return run("layouts")


KINDS = ("auto", "explicit")
LAYOUTS = ("data", "full")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_on_eight_devices_is_that_of_one(layouts, layout, kind):
    found, one = layouts[f"{layout}, {kind}"], layouts["one"]
    assert_close(found["params"], one["params"], 1e-12)
    assert abs(found["loss"] - one["loss"]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_each_array_that_eight_devices_divide_each_has_an_eighth(layouts, layout, kind):
    """Parameters, averages, bases, momentum; a factor of 25 with its ones column they do not."""
    for option in ("", ", divided"):
        for name, (shape, here) in layouts[f"{layout}, {kind}{option}"]["held"].items():
            divided = len(shape) > 1 and not all(n % 8 for n in shape) and layout == "full"
            assert np.prod(here) == np.prod(shape) / (8 if divided else 1), name
            assert divided or layout == "data" or len(shape) < 2 or 25 in shape or 3 in shape, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_divided_decompositions_are_those_that_every_device_does(layouts, layout, kind):
    found, whole = layouts[f"{layout}, {kind}, divided"], layouts[f"{layout}, {kind}"]
    # The decompositions have the same bits (_divided_test.py); XLA may fuse around them otherwise.
    assert_close(found["params"], whole["params"], 1e-12)
    assert abs(found["loss"] - whole["loss"]) < 1e-12


@pytest.mark.slow
def test_a_separable_damping_is_divided_too(layouts):
    found, one = layouts["data, pi, divided"], layouts["one, pi"]
    assert_close(found["params"], one["params"], 1e-12)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_in_single_precision_eight_devices_differ_by_rounding():
    found = run("single")
    for layout in LAYOUTS:
        assert_close(found[layout]["params"], found["one"]["params"], 1e-6)


@pytest.mark.exhaustive  # _divided_test of curvature has two devices in the default run
@pytest.mark.slow
def test_outside_of_jit_the_mesh_is_that_of_the_parameters():
    found = run("outside")
    # The decompositions have the same bits (_divided_test.py); XLA may fuse around them otherwise.
    assert_close(found["divided"], found["one"], 1e-12)
