"""Batch norm and spectral norm of Equinox, which carry a state."""

import equinox as eqx
import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script, train


class Net(eqx.Module):
    norm: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.hidden = eqx.nn.Linear(3, 16, key=a)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(16, 16, key=b), "weight", key=c)
        self.head = eqx.nn.Linear(16, 2, key=d)

    def __call__(self, x, state):
        x, state = self.norm(self.hidden(x), state)
        x, state = self.spectral(jax.nn.relu(x), state)
        return self.head(jax.nn.relu(x)), state


def batch_of(key):
    x = jax.random.normal(key, (64, 3))
    return x, (x.prod(1) > 0).astype(jnp.int32)


@script("stateful: Equinox, batch norm, spectral norm")
def run(optimizer, seed):
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(seed))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply_fn(params, x, state):
        model = eqx.combine(params, static)
        rows = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        return rows(x, state)

    # The matrix behind the spectral norm is covered by no layer, because batch norm couples rows.
    opt = jk.Optimizer(jk.Objective(apply_fn, jk.Categorical()), optimizer, uncovered="ignore")
    return train(opt, params, batch_of, seed, state=state)
