"""Influence and Laplace give what three peers give, where their environments are named."""

import argparse
import os
from pathlib import Path

import jax
import pytest

from benchmarks._uses.jobs import TOLERANCE
from benchmarks._uses.problems import INFLUENCE_EQUAL
from benchmarks.uses import PEERS


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_results_in_float64_are_those_of_the_peer(name):
    """By the benchmark's own jobs, each in processes and an environment of its own."""
    variable = f"{name.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{name} has an environment of its own: {variable} is its Python")
    arguments = argparse.Namespace(
        problems=list(INFLUENCE_EQUAL), equal=True, examples=None, keep=None
    )
    found = PEERS[name](Path(os.environ[variable]), arguments)["equal"]
    differences = jax.tree.leaves(found)
    assert len(differences) >= 1 and max(differences) <= TOLERANCE
