"""A variational autoencoder in Linen: the loss is the user's own, with its outputs marked."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxkfac as jk
from tests.scripts._script import script, train

SIZE, LATENTS = 36, 4


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.relu(nn.Dense(32)(x))
        mean, log_variance = nn.Dense(LATENTS)(h), nn.Dense(LATENTS)(h)
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
        return nn.Dense(SIZE)(nn.relu(nn.Dense(32)(z))), mean, log_variance


@script("images: variational autoencoder, a marked loss")
def run(optimizer, seed):
    model = VAE()
    basis = jax.random.normal(jax.random.key(100 + seed), (LATENTS, SIZE))

    def loss_fn(params, x, key):
        logits, mean, log_variance = model.apply(params, x, key)
        logits = jk.mark_outputs(logits, jk.Bernoulli())
        likelihood = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
        return (likelihood + divergence).mean()

    def batch_of(key):
        hidden = jax.random.normal(key, (64, LATENTS))
        return (hidden @ basis > 0).astype(jnp.float32)

    params = model.init(jax.random.key(seed), jnp.zeros((1, SIZE)), jax.random.key(0))
    return train(jk.Optimizer(loss_fn, optimizer), params, batch_of, seed)
