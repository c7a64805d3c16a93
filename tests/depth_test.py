"""Functions of many nested calls and of many layers: how far they go, and what is said beyond."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk

BATCH = jnp.ones((4, 3)), jnp.zeros((4, 2))
PARAMS = {"w": jnp.full((3, 2), 0.5)}


def nested(depth):
    def fn(params, x):
        inner = lambda x: jnp.tanh(x @ params["w"])
        for _ in range(depth):
            inner = jax.jit(lambda x, inner=inner: inner(x))
        return inner(x)

    return fn


def statistics(depth):
    return jk.value_grad_and_factors(jk.Objective(nested(depth), jk.Gaussian()))


@pytest.mark.exhaustive
def test_statistics_of_eighty_five_nested_jits_are_those_of_none():
    """In a short script at least 115 work, where ``jax.grad`` works in 95."""
    assert len(jk.find_layers(nested(85), PARAMS, BATCH[0])) == 1
    found, expected = statistics(85)(PARAMS, BATCH), statistics(0)(PARAMS, BATCH)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.allclose(x, y)), found, expected))


def test_beyond_pythons_limit_of_frames_the_error_says_what_to_do():
    for call in (lambda: jk.find_layers(nested(200), PARAMS, BATCH[0]),
                 lambda: statistics(200)(PARAMS, BATCH)):  # fmt: skip
        with pytest.raises(RecursionError, match=r"120 nested jits.*sys\.setrecursionlimit"):
            call()


PROGRAM = """
import sys
import jax
import jaxkfac as jk
from tests.depth_test import BATCH, PARAMS, nested, statistics
sys.setrecursionlimit(4000)
assert len(jk.find_layers(nested(200), PARAMS, BATCH[0])) == 1
print(float(statistics(200)(PARAMS, BATCH)[0]) - float(statistics(0)(PARAMS, BATCH)[0]))
"""


@pytest.mark.exhaustive
def test_with_a_higher_limit_two_hundred_nested_jits_have_statistics():
    """In a process of its own: the limit is everybody's."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout)) < 1e-6


def chain(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize(
    "depth",
    [
        pytest.param(200, marks=pytest.mark.slow),
        pytest.param(3000, marks=pytest.mark.exhaustive),
    ],
)
def test_thousands_of_layers_are_found_and_have_statistics(depth):
    params = [jnp.eye(2)] * depth
    batch = jnp.ones((4, 2)), jnp.zeros((4, 2))
    assert len(jk.find_layers(chain, params, batch[0])) == depth
    stats = jk.value_grad_and_factors(jk.Objective(chain, jk.Gaussian()))
    assert len(stats.factor_shapes(params, batch).layers) == depth
    _, grads, factors = jax.eval_shape(stats, params, batch)
    assert len(grads) == len(factors.layers) == depth


@pytest.mark.exhaustive
def test_a_plan_of_four_hundred_layers_counts_them_all():
    """It takes a fifth of a second for each layer, since it traces some twenty programs."""
    params = [jax.ShapeDtypeStruct((2, 2), jnp.float32)] * 400
    batch = (jax.ShapeDtypeStruct((4, 2), jnp.float32),) * 2
    plan = jk.plan_memory(jk.Objective(chain, jk.Gaussian()), params, batch, device_bytes="1GiB")
    assert plan.now.device["parameters"] == 400 * 4 * 4
