"""Pairs as an encoder-decoder's training reads them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.cli.finetune._encoder_decoder import EncoderDecoderFamily
from jaxkfac.jobs.cli.finetune._options import AdapterKfacOptions, Finetuning
from jaxkfac.jobs.cli.finetune._problem import collector, objective_of, shaped_problem
from jaxkfac.jobs.data.pairs import PairExample, pair_batch
from jaxkfac.jobs.models import EncoderDecoder, EncoderDecoderConfig, Pretrained

CONFIG = EncoderDecoderConfig(
    vocabulary=11, width=8, hidden=6, encoder_depth=1, decoder_depth=2, num_heads=2, head_size=4
)
FAMILY = EncoderDecoderFamily()


@pytest.mark.slow
@pytest.mark.parametrize("train", [pytest.param("all", marks=pytest.mark.exhaustive), "adapter"])
def test_padding_of_either_side_is_in_no_loss_gradient_or_factor(train, x64):
    rng = np.random.default_rng(0)
    examples = [
        PairExample(*(rng.integers(1, 11, size=n) for n in lengths))
        for lengths in ((5, 4), (5, 4), (2, 3))
    ]
    kfac = AdapterKfacOptions(1e-3, fisher="empirical")  # sampled labels differ with the shape
    experiment = Finetuning(model="t5-bytes", data="wordnet", train=train, kfac=kfac)
    apply_fn, params = jk.from_nnx(EncoderDecoder(CONFIG, rngs=nnx.Rngs(0)))

    def moved(tree):
        """Away from zeros, in float64."""
        shifted = lambda x: jnp.asarray(np.asarray(x, float) + 0.1 * rng.normal(size=x.shape))
        return jax.tree.map(shifted, tree)

    pretrained = Pretrained(CONFIG, apply_fn, moved(params), None)
    problem = shaped_problem(experiment, pretrained)
    trained = moved(problem.initial())
    collect = collector(experiment, objective_of(experiment, problem, problem.params))

    def found(source, target):
        lengths = {"source_length": source, "target_length": target}
        batch = FAMILY.batch(pair_batch(examples, **lengths, pad_id=0, start_id=0))
        return collect(trained, batch, key=jax.random.key(0), positions=FAMILY.exist(batch))

    tight, padded = found(5, 4), found(8, 9)
    assert len(tight.factors) > 8
    near = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-10)
    jax.tree.map(near, padded, tight)
