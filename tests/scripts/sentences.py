"""Sentences of several lengths by a two-way LSTM of Linen, in a TrainState."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script

TOKENS, LENGTH = 20, 10


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens, lengths):
        x = nn.Embed(TOKENS, 16)(tokens)
        cells = (nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True) for _ in range(2))
        (_, forward), (_, backward) = nn.Bidirectional(*cells, return_carry=True)(
            x, seq_lengths=lengths
        )[0]
        return nn.Dense(1)(jnp.concatenate([forward, backward], -1))[:, 0]


def batch_of(key):
    lengths = jax.random.randint(key, (64,), 3, LENGTH + 1)
    tokens = jax.random.randint(jax.random.fold_in(key, 1), (64, LENGTH), 0, TOKENS)
    within = jnp.arange(LENGTH) < lengths[:, None]
    score = jnp.where(within, tokens - TOKENS / 2, 0).sum(1)
    return (tokens, lengths), (score > 0).astype(jnp.float32)


@script("sentences: Linen, two-way LSTM, TrainState")
def run(optimizer, seed):
    model, keys = Classifier(), jax.random.split(jax.random.key(seed), 60)
    first = batch_of(keys[0])
    params = model.init(keys[0], *first[0])
    opt = jk.Optimizer(jk.Objective(model.apply, jk.Bernoulli()), optimizer)
    state = jk.TrainState.create(apply_fn=model.apply, params=params, tx=opt, batch=first)
    train_step, losses = jax.jit(lambda state, batch, key: state.train_step(batch, key)), []
    for key in keys:
        state, loss = train_step(state, batch_of(key), key)
        losses.append(float(loss))
    jk.check_state(state)
    return losses
