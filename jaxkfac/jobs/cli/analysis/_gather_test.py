"""Sums over very many batches keep their digits, in bytes that the plan counts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.blocks import Place
from jaxkfac.factors import Pass
from jaxkfac.jobs.cli.analysis._files import Folder, Part
from jaxkfac.jobs.cli.analysis._gather import gather
from jaxkfac.jobs.cli.analysis._program import AnalyzedModel, sums_bytes
from jaxkfac.jobs.cli.analysis._texts import Texts

BATCH = jnp.linspace(-1, 1.1, 21).reshape(7, 3), jnp.arange(7) % 2
BATCHES = 2000


@pytest.fixture(scope="module")
def factors():
    objective = jk.Objective(lambda p, x: jnp.tanh(x @ p["kernel"]), jk.Categorical())
    params = {"kernel": jnp.linspace(-0.3, 0.4, 6).reshape(3, 2)}
    return jk.value_grad_and_factors(objective)(params, BATCH)[2]


def gathered(folder, factors, batches, stopped=lambda: False):
    """What a pass finds over so many batches that are alike."""
    result = (np.float32(0.7), factors)
    analysis: Any = AnalyzedModel.__new__(
        AnalyzedModel
    )  # of one pass, which returns the same each time
    analysis.passes, analysis.stacks = (Pass({}, 0, 0),), {}
    analysis.call = analysis.key_of = lambda *_: None
    analysis.program = lambda *_: lambda *_: jax.tree.map(jnp.array, result)
    texts = Texts([np.zeros(1)] * batches, [np.ones(1, bool)] * batches, 0, 0, 0, "")
    every = {"every": batches + 1, "advance": lambda *_: None}
    gather(analysis, None, texts, Folder(folder), stopped=stopped, **every)


def worst(found, expected):
    expected = np.asarray(expected, np.float64)
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.exhaustive
def test_sums_of_many_batches_keep_their_digits_also_where_they_go_on(factors, tmp_path):
    calls = []

    def stopped():
        calls.append(None)
        return len(calls) == BATCHES // 2

    with pytest.raises(KeyboardInterrupt):
        gathered(tmp_path, factors, BATCHES, stopped)
    assert (tmp_path / "factors" / "pass-0").stat().st_size
    gathered(tmp_path, factors, BATCHES)
    for table in ("a", "g"):
        one = factors.side(Place(table, "kernel")).data
        part = Part(table, "kernel", None)
        found = Folder(tmp_path).load_part(part)
        assert found.arrays[part].dtype == np.float32
        assert worst(found.in_full(part), BATCHES * np.asarray(one, np.float64)) < 2e-7
        plain = np.zeros_like(one)
        for _ in range(BATCHES):
            plain += np.asarray(one)
        assert worst(plain, BATCHES * np.asarray(one, np.float64)) > 2e-6  # what it is for
        for count in found.counts.values():
            assert count == 7 * BATCHES


def test_the_plan_counts_the_bytes_of_longer_sums():
    assert [sums_bytes(32, number) for number in (1, 256, 257)] == [18, 18, 34]
