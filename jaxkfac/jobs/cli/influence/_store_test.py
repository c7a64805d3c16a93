"""`--store` stopped while it is written; and the choice of `--factors-from`, uniform over seeds."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from jaxkfac.jobs.cli.influence._score import Scoring, stored

TEXTS = list(range(11))
INPUTS = np.asarray(jax.random.normal(jax.random.key(0), (12, 3)))
OBJECTIVE = jk.Objective(lambda params, x: x @ params["head"], jk.Categorical())
PARAMS = {"head": jnp.ones((3, 2))}


def scoring(folder, stop=None):
    """What ``stored`` reads of a run, whose batches end in Ctrl-C after ``stop`` of them."""

    def batches(texts):
        for number, start in enumerate(range(0, len(texts), 4)):
            if number == stop:
                raise KeyboardInterrupt
            yield INPUTS[start : start + 4], np.zeros(4, int)

    return SimpleNamespace(
        arguments=SimpleNamespace(store=folder, store_rank=1, batch_size=4),
        train=SimpleNamespace(texts=TEXTS),
        pretrained=SimpleNamespace(params=PARAMS),
        objective=OBJECTIVE,
        batches=batches,
    )


def test_a_store_that_is_gone_on_with_has_the_same_bytes(tmp_path):
    stats = jk.value_grad_and_factors(OBJECTIVE)
    bases = jk.eigendecompose(stats(PARAMS, (INPUTS, np.zeros(12, int))).factors)
    part, whole = tmp_path / "part", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        stored(scoring(part, stop=2), bases)
    assert [x.name for x in tmp_path.iterdir()] == ["part.partial"]
    for folder in (part, whole):
        store = stored(scoring(folder), bases)
        assert store is not None and store.rank == 1
    files = [{x.name: x.read_bytes() for x in folder.iterdir()} for folder in (part, whole)]
    assert files[0] == files[1] and len(files[0]) == 5  # three batches, sums and a journal
    assert stored(scoring(None), bases) is None


def test_every_text_is_chosen_as_often_over_the_seeds():
    """So sums over the chosen texts are unbiased, scaled by the part that is chosen."""
    number, seeds = 4, 2000
    counts = np.zeros(len(TEXTS))
    for seed in range(seeds):
        arguments = SimpleNamespace(factors_from=number, seed=seed)
        run = SimpleNamespace(arguments=arguments, train=SimpleNamespace(texts=TEXTS))
        chosen = Scoring.chosen(run)
        assert len(set(chosen)) == number and chosen == sorted(chosen)
        counts[chosen] += 1
    part = number / len(TEXTS)
    standard_error = (part * (1 - part) / seeds) ** 0.5
    assert np.abs(counts / seeds - part).max() < 4 * standard_error
