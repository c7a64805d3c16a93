"""A normalizing flow: its loss is the change of variables, and has no outputs to mark."""

import jax
import jax.numpy as jnp

import jaxkfac as jk
from tests.scripts._script import script, train

SIZE, LAYERS = 4, 3


def coupled(params, x):
    """``log p`` of each row."""
    total = jnp.zeros(len(x))
    for layer in params:
        kept, moved = jnp.split(x, 2, axis=1)
        h = jnp.tanh(kept @ layer["up"] + layer["bias"])
        shift, scale = jnp.split(h @ layer["down"], 2, axis=1)
        scale = jnp.tanh(scale)
        x = jnp.concatenate([(moved - shift) * jnp.exp(-scale), kept], 1)
        total -= scale.sum(1)
    return total - (x**2 / 2).sum(1) - SIZE / 2 * jnp.log(2 * jnp.pi)


@script("density: a flow, no outputs")
def run(optimizer, seed):
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    params = [
        {
            "up": jax.random.normal(key, (SIZE // 2, 16)),
            "bias": jnp.zeros(16),
            "down": jnp.zeros((16, SIZE)),
        }
        for key in keys
    ]

    def batch_of(key):
        x = jax.random.normal(key, (128, SIZE))
        return x.at[:, 1].set(x[:, 0] ** 2 + 0.1 * x[:, 1]).at[:, 3].multiply(0.05)

    loss_fn = lambda params, x: -coupled(params, x).mean()
    opt = jk.Optimizer(loss_fn, optimizer, loss_terms=128)
    return train(opt, params, batch_of, seed)
