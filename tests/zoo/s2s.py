"""What `jaxkfac finetune` trains of an encoder-decoder."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkfac as jk
from jaxkfac.models import EncoderDecoder, Pairs
from tests._programs import labels
from tests.zoo import Case, program
from tests.zoo.t5 import FAMILY, LENGTHS, RELU


@program("T5 with LS-LoRA on q and v, padded on both sides", family=FAMILY, checked="gradient")
def _adapted():
    apply_fn, params = jk.from_nnx(EncoderDecoder(RELU, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: jnp.asarray(x, float), params)
    source, target = (labels(seed, 2, n, classes=11) for seed, n in ((1, 5), (2, 4)))
    pairs = Pairs(source, jnp.arange(5) < LENGTHS, target)
    config = jk.lslora.Config(rank=2, target=r".*Attention/[qv]/kernel")
    adapters = jk.lslora.init(apply_fn, config, params, pairs, key=jax.random.key(0))
    draw = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * draw.normal(size=x.shape)), adapters)
    adapted = jk.lslora.attach(apply_fn, config)

    def apply(adapters, pairs):
        return adapted(params, adapters, pairs)

    batch = (pairs, labels(3, 2, 4, classes=11), jnp.arange(4) < LENGTHS - 1)
    return Case(jk.Objective(apply, jk.Categorical()), adapters, batch)
