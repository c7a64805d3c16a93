"""A language model of Haiku, with clipping before the optimizer."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from tests.scripts._script import script, train

TOKENS, LENGTH, WIDTH = 12, 16, 32


def decoder(tokens):
    x = hk.Embed(TOKENS, WIDTH)(tokens)
    x += hk.get_parameter("positions", (LENGTH, WIDTH), init=hk.initializers.RandomNormal(0.02))
    norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
    h = norm(x)
    attention = hk.MultiHeadAttention(2, WIDTH // 2, model_size=WIDTH, w_init_scale=1.0)
    x += attention(h, h, h, mask=mask)
    h = norm(x)
    x += hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(h)))
    return hk.Linear(TOKENS)(norm(x))


def batch_of(key):
    start, step = jax.random.randint(key, (2, 32, 1), 1, TOKENS)
    text = (start + step * jnp.arange(LENGTH + 1)) % TOKENS
    return text[:, :-1], text[:, 1:]


@script("characters: Haiku, a transformer, clipped")
def run(optimizer, seed):
    model = hk.without_apply_rng(hk.transform(decoder))
    params = model.init(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))
    clip = optax.clip_by_global_norm(1.0)
    chain = optax.chain(clip, jk.kfac() if optimizer is None else optimizer)
    opt = jk.Optimizer(jk.Objective(model.apply, jk.Categorical()), chain)
    return train(opt, params, batch_of, seed, steps=80)
