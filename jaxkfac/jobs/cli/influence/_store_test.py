"""`--store` stopped while it is written; and the choice of `--factors-from`, uniform over seeds."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.jobs.cli.influence._options import InfluenceArguments
from jaxkfac.jobs.cli.influence._score import Scoring, stored
from jaxkfac.jobs.cli.influence._texts import NumberedText

TEXTS = [NumberedText(row, None) for row in range(11)]
INPUTS = jax.random.normal(jax.random.key(0), (12, 3))
OBJECTIVE = jk.Objective(lambda params, x: x @ params["head"], jk.Categorical())
PARAMS = {"head": jnp.ones((3, 2))}


class Run(Scoring):
    """A run whose texts are rows; with queries "stop" they end in Ctrl-C after two batches."""

    objective = OBJECTIVE

    def batches(self, texts, **options):
        for number, start in enumerate(range(0, len(texts), 4)):
            if number == 2 and self.queries == "stop":
                raise KeyboardInterrupt
            yield INPUTS[start : start + 4], jnp.zeros(4, int)


def run(queries=None, **options):
    arguments = InfluenceArguments(Path("train"), Path("queries"), batch_size=4, **options)
    texts, pretrained = SimpleNamespace(texts=TEXTS), SimpleNamespace(params=PARAMS)
    return Run(arguments, None, pretrained, None, texts, queries, "")


@pytest.mark.slow
def test_a_store_that_is_gone_on_with_has_the_same_bytes(tmp_path):
    stats = jk.value_grad_and_factors(OBJECTIVE)
    bases = jk.eigendecompose(stats(PARAMS, (INPUTS, jnp.zeros(12, int))).factors)
    part, whole = tmp_path / "part", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        stored(run("stop", store=part, store_rank=1), bases)
    assert [x.name for x in tmp_path.iterdir()] == ["part.partial"]
    for folder in (part, whole):
        store = stored(run(store=folder, store_rank=1), bases)
        assert store is not None and store.rank == 1
    files = [{x.name: x.read_bytes() for x in folder.iterdir()} for folder in (part, whole)]
    assert files[0] == files[1] and len(files[0]) == 5  # three batches, sums and a journal
    assert stored(run(), bases) is None


def test_every_text_is_chosen_as_often_over_the_seeds():
    """So sums over the chosen texts are unbiased, scaled by the part that is chosen."""
    number, seeds = 4, 2000
    counts = np.zeros(len(TEXTS))
    for seed in range(seeds):
        chosen = run(factors_from=number, seed=seed).chosen()
        rows = [text.row for text in chosen]
        assert len(set(rows)) == number and rows == sorted(rows)
        counts[rows] += 1
    part = number / len(TEXTS)
    standard_error = (part * (1 - part) / seeds) ** 0.5
    assert np.abs(counts / seeds - part).max() < 4 * standard_error
