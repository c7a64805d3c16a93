"""A small GPT with a tied head on two devices, each with half of the batch, by ``jax.pmap``."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkfac as jk
from tests.scripts._script import script

TOKENS, LENGTH, WIDTH, HEADS, BLOCKS, STEPS = 16, 16, 32, 2, 1, 60


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(block, x):
    q, k, v = jnp.split(x @ block["qkv"], 3, axis=-1)
    split = lambda x: x.reshape(*x.shape[:2], HEADS, -1)
    out = jax.nn.dot_product_attention(split(q), split(k), split(v), is_causal=True)
    return out.reshape(x.shape) @ block["out"]


def gpt(params, tokens):
    x = params["tokens"][tokens] + params["positions"]
    for block in params["blocks"]:
        x = x + attention(block, normalized(x) * block["scale"])
        x = x + jax.nn.gelu(normalized(x) @ block["up"] + block["bias"]) @ block["down"]
    return normalized(x) @ params["tokens"].T


def first_params(key):
    keys = iter(jax.random.split(key, 20))
    matrix = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5
    blocks = [
        {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "scale": jnp.ones(WIDTH),
            "up": matrix(WIDTH, 2 * WIDTH),
            "bias": jnp.zeros(2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH),
        }
        for _ in range(BLOCKS)
    ]
    tokens = jax.random.normal(next(keys), (TOKENS, WIDTH)) * 0.1
    return {"tokens": tokens, "positions": jnp.zeros((LENGTH, WIDTH)), "blocks": blocks}


def batch_of(key):
    """Texts in which each token follows from the two before it."""
    first = jax.random.randint(key, (32, 2), 0, TOKENS)

    def more(last, _):
        new = (3 * last[:, 0] + last[:, 1]) % TOKENS
        return jnp.stack([last[:, 1], new], 1), new

    text = jax.lax.scan(more, first, length=LENGTH + 1)[1].T
    return text[:, :-1], text[:, 1:]


@script("text: a GPT with a tied head, two devices")
def run(optimizer, seed):
    opt = jk.Optimizer(jk.Objective(gpt, jk.Categorical()), optimizer, axis_name="devices")
    params, keys = first_params(jax.random.key(seed)), jax.random.split(jax.random.key(seed), STEPS)
    batch = batch_of(keys[0])
    replicate = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
    halves = lambda tree: jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), tree)
    params, state = replicate(params), replicate(opt.init(params, batch))
    step, losses = jax.pmap(opt.step, axis_name="devices"), []
    for key in keys:
        params, state, loss = step(params, state, halves(batch_of(key)), replicate(key))
        losses.append(float(loss[0]))
    for one, other in (np.asarray(x) for x in jax.tree.leaves(params)):
        np.testing.assert_array_equal(one, other)  # the devices did not part
    jk.check_state(jax.tree.map(lambda x: x[0], state))
    return losses
