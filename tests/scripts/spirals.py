"""Which way a spiral turns, by a GRU of Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script, train


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 10, key=first)
        self.head = eqx.nn.Linear(10, 1, key=second)

    def __call__(self, series):
        hidden, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(10), series)
        return self.head(hidden)[0]


def batch_of(key):
    time = jnp.linspace(0, 4 * jnp.pi, 16)
    phase = jax.random.uniform(key, (32, 1)) * 2 * jnp.pi
    x, y = jnp.sin(time + phase) * time / 8, jnp.cos(time + phase) * time / 8
    turns = jax.random.bernoulli(jax.random.fold_in(key, 1), shape=(32,))
    x = jnp.where(turns[:, None], -x, x)
    return jnp.stack([x, y], -1), turns.astype(jnp.float32)


@script("spirals: Equinox, a GRU")
def run(optimizer, seed):
    model = RNN(jax.random.key(seed))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    apply_fn = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
    opt = jk.Optimizer(jk.Objective(apply_fn, jk.Bernoulli()), optimizer)
    return train(opt, params, batch_of, seed, steps=200)
