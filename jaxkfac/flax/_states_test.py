"""States are written and read by Flax, whichever of Flax and jaxkfac is imported first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import {first}
import {second}
import jax
import jax.numpy as jnp
from flax import serialization
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors
from jaxkfac.optim import kfac

params, batch = {{"w": jnp.ones((3, 2))}}, (jnp.ones((4, 3)), jnp.ones((4, 2)))
stats = value_grad_and_factors(Objective(lambda p, x: x @ p["w"], Gaussian()))
zeros = kfac(0.1, like=stats.factor_shapes(params, batch)).init(params)
state = jax.tree.map(lambda x: x + 1, zeros)
read = serialization.from_bytes(zeros, serialization.to_bytes(state))
assert jax.tree.structure(read) == jax.tree.structure(state)
assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), read, state))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("flax.serialization", "jaxkfac.optim"),
        ("jaxkfac.optim", "flax.serialization"),
        ("jaxkfac.blocks", "flax.linen"),
    ],
)
def test_the_order_of_imports_makes_no_difference(first, second):
    program = _PROGRAM.format(first=first, second=second)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_flax_is_imported_by_one_room_below_the_models():
    """Other rooms are neutral: what they know of Flax is what it has registered with JAX."""
    root = Path(__file__).parents[1]
    importing = {
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        if not path.name.endswith("_test.py")
        and re.search(r"^(from|import) flax\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {"flax", "jobs"}
