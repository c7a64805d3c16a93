"""`--dropout` of an encoder-decoder: the file's rate, or another, in training alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.jobs.cli.finetune import _encoder_decoder
from jaxkfac.jobs.cli.finetune._load import load_text, model_shapes
from jaxkfac.jobs.cli.finetune._options import AdapterOptions, Finetuning
from jaxkfac.jobs.cli.finetune._pairs_run_test import CONFIG
from jaxkfac.jobs.cli.finetune._problem import objective_of, options_of, shaped_problem

BASE = Finetuning(model="t5-bytes", data="wordnet", batch_size=2, max_length=8, max_target_length=8)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(_encoder_decoder, "_BYTES", CONFIG)
    monkeypatch.setitem(_encoder_decoder.ENCODER_DECODERS, "t5-bytes", CONFIG)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("given", "rate"), [(None, 0.2), (0.0, 0.0), (0.3, 0.3)])
@pytest.mark.parametrize("train", ["adapter", "all"])
def test_the_rate_is_the_files_unless_another_is_given(given, rate, train, tmp_path):
    config = dataclasses.replace(CONFIG, dropout=0.2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    experiment = dataclasses.replace(BASE, model=str(tmp_path), train=train, dropout=given)
    problem = shaped_problem(experiment, model_shapes(experiment))
    assert options_of(experiment, problem)["dropout"] == rate
    assert problem.drops(experiment) is (rate > 0)


@pytest.mark.slow
def test_adapters_may_drop_where_the_model_does_not():
    experiment = dataclasses.replace(BASE, adapter=AdapterOptions(dropout=0.1))
    problem = shaped_problem(experiment, model_shapes(experiment))
    assert options_of(experiment, problem)["dropout"] == 0.0 and problem.drops(experiment)


def test_a_decoder_has_none():
    with pytest.raises(ValueError, match="--dropout is for encoder-decoders, and smollm2 is a"):
        load_text(Finetuning(dropout=0.1))
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\), not 1"):
        Finetuning(dropout=1.0)


@pytest.mark.slow
def test_training_drops_by_its_key_and_a_measurement_does_not():
    experiment = dataclasses.replace(BASE, train="all", dropout=0.4)
    pretrained = _encoder_decoder.EncoderDecoderFamily().load(experiment)
    problem = shaped_problem(experiment, pretrained)
    ids = jnp.arange(16).reshape(2, 8)
    inputs = problem.family.rows(experiment, None)[0]._replace(source=ids, decoder_inputs=ids)
    batch, params, key = (inputs, ids, ids > 0), pretrained.params, jax.random.key(0)
    training = jax.jit(objective_of(experiment, problem, {}))
    measuring = jax.jit(objective_of(experiment, problem, {}, drops=False))
    kept = float(measuring(params, batch, key))
    assert float(training(params, batch)) == kept
    dropped = float(training(params, batch, key))
    assert dropped == float(training(params, batch, key)) != kept
    assert abs(dropped - kept) > 1e-4 and np.isfinite(dropped)
