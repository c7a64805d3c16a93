"""Programs whose calls change a state, draw random numbers, or take several inputs."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import jaxkfac as jk
from tests._oracle import oracle
from tests._programs import labels, normal, tree
from tests.coupled_examples_test import batch_norm, of_batch
from tests.zoo import Case, program

FAMILY = "State, keys and several inputs"


def classifier(apply_fn):
    return jk.Objective(apply_fn, jk.Categorical())


@program("recurrent state carried from batch to batch", family=FAMILY, checked="brute force")
def _carried():
    """Truncated backpropagation: the last hidden state of a batch is the first of the next."""

    def apply_fn(p, x, state):
        hidden = jnp.tanh(x @ p["w"] + state @ p["u"])
        return hidden @ p["head"], hidden

    def twin(p, x, tap):
        state = jnp.broadcast_to(first, (len(x), 5))
        hidden = jnp.tanh(tap.dense("w", x, x @ p["w"]) + tap.dense("u", state, state @ p["u"]))
        return tap.dense("head", hidden, hidden @ p["head"])

    first = normal(6, 5)
    params = {"w": normal(1, 3, 5), "u": normal(2, 5, 5), "head": normal(3, 5, 3)}
    batch = (normal(4, 4, 3), labels(5, 4))
    state = jnp.broadcast_to(first, (4, 5))
    return Case(classifier(apply_fn), params, batch, twin, call={"state": state})


@program("NNX model with dropout", family=FAMILY, checked="gradient")
def _dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 5, param_dtype=float, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.down = nnx.Linear(5, 3, param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return self.down(self.dropout(jnp.tanh(self.up(x))))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    batch = (normal(1, 5, 4), labels(2, 5))
    return Case(classifier(apply_fn), params, batch, call={"key": jax.random.key(3)})


def layers(kernel="kernel", bias="bias"):
    up, down = tree(0, **{kernel: (4, 5), bias: (5,)}), tree(1, **{kernel: (5, 3), bias: (3,)})
    return {"up": up, "down": down}


def masked(apply_fn, params, mask, key):
    """Two layers; what the first one gives is multiplied by a mask that the key draws."""
    kernel, bias = params["up"]

    def model(p, inputs, tap):
        def dense(name, x):
            y = x @ p[name][kernel] + p[name][bias]
            return tap.dense(f"{name}/{kernel}", x, y, bias=True)

        x, mask = inputs
        return dense("down", jnp.tanh(dense("up", x)) * mask)

    x, y = normal(1, 5, 4), labels(2, 5)
    factors = oracle(model, params, ((x, mask), y))
    return Case(classifier(apply_fn), params, (x, y), factors=factors, call={"key": key})


@program("Linen: dropout with a key", family=FAMILY, checked="brute force")
def _linen_dropout():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = jnp.tanh(nn.Dense(5, param_dtype=float, name="up")(x))
            h = nn.Dropout(0.5, deterministic=False, name="dropout")(h)
            return nn.Dense(3, param_dtype=float, name="down")(h)

    def apply_fn(params, x, key):
        return Net().apply({"params": params}, x, rngs={"dropout": key})

    params, key = layers(), jax.random.key(3)
    _, seen = Net().apply(
        {"params": params}, normal(1, 5, 4), rngs={"dropout": key}, capture_intermediates=True
    )
    mask = 2.0 * (seen["intermediates"]["dropout"]["__call__"][0] != 0)
    return masked(apply_fn, params, mask, key)


@program("Haiku: dropout with a key", family=FAMILY, checked="brute force")
def _haiku_dropout():
    def forward(x):
        h = jnp.tanh(hk.Linear(5, name="up")(x))
        h = hk.dropout(hk.next_rng_key(), 0.5, h)
        return hk.Linear(3, name="down")(h)

    net, key = hk.transform(forward), jax.random.key(3)

    def apply_fn(params, x, key):
        return net.apply(params, key, x)

    alone = hk.transform(lambda: hk.dropout(hk.next_rng_key(), 0.5, jnp.ones((5, 5))))
    return masked(apply_fn, layers("w", "b"), alone.apply({}, key), key)


@program("NNX: BatchNorm in training, its statistics as state", family=FAMILY,
         checked="brute force over the whole batch")  # fmt: skip
def _nnx_batch_norm():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 5, use_bias=False, param_dtype=float, rngs=rngs)
            self.norm = nnx.BatchNorm(5, epsilon=1e-3, param_dtype=float, rngs=rngs)
            self.down = nnx.Linear(5, 3, use_bias=False, param_dtype=float, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.norm(self.up(x))))

    def twin(p, x, tap):
        y = tap.dense("up/kernel", x, x @ p["up"]["kernel"])
        y = jnp.tanh(batch_norm(tap, "norm", p["norm"], y))
        return tap.dense("down/kernel", y, y @ p["down"]["kernel"])

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)), mutable=nnx.BatchStat)
    params["norm"] = jax.tree.map(lambda x: x + normal(7, *x.shape), params["norm"])
    data = (normal(1, 6, 4), labels(2, 6))
    factors, state = of_batch(twin, params, data), {"state": apply_fn.state}
    return Case(classifier(apply_fn), params, data, factors=factors, call=state)


@program("NNX attention from one stream to another", family=FAMILY, checked="gradient")
def _two_inputs():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(
                2, 4, param_dtype=float, decode=False, rngs=rngs
            )

        def __call__(self, queries, keys):
            return self.attention(queries, keys)

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    batch = ((normal(1, 2, 3, 4), normal(2, 2, 5, 4)), labels(3, 2, 3, classes=4))
    return Case(classifier(apply_fn), params, batch)
