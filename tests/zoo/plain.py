"""Programs that were covered from the first release on."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._checks import objective_of
from tests._programs import (
    attention,
    attention_params,
    labels,
    mlp,
    mlp_params,
    normal,
    recurrent,
    recurrent_unrolled,
    scanned,
    scanned_params,
    unrolled,
)
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Layers and loops"


def classifier(apply_fn):
    return jk.Objective(apply_fn, jk.Categorical())


@program("dense layers with biases", family=FAMILY, checked="brute force")
def _mlp():
    return Case(objective_of(mlp), mlp_params(), (normal(1, 5, 4), labels(2, 5)), mlp)


@program("attention with heads, norm and head", family=FAMILY, checked="brute force")
def _attention():
    batch = (normal(1, 2, 3, 4), labels(2, 2, 3))
    return Case(objective_of(attention), attention_params(), batch, attention)


@program("blocks in scan of remat of jit", family=FAMILY, checked="brute force, unrolled")
def _scanned():
    batch = (normal(1, 2, 3, 4), labels(2, 2, 3))
    return Case(objective_of(scanned), scanned_params(), batch, unrolled)


@program("recurrence over time", family=FAMILY, checked="brute force, unrolled")
def _recurrent():
    params = {
        "w": normal(3, 3, 4), "u": normal(4, 4, 4), "b": normal(5, 4), "head": normal(6, 4, 3)
    }  # fmt: skip
    batch = (normal(1, 2, 3, 3), labels(2, 2))
    return Case(objective_of(recurrent), params, batch, recurrent_unrolled)


@program("lax.map over examples", family=FAMILY, checked="brute force")
def _mapped():
    objective = classifier(lambda p, x: lax.map(lambda row: mlp(p, row, PLAIN), x))
    return Case(objective, mlp_params(), (normal(1, 4, 4), labels(2, 4)), mlp)


@program("static fori_loop over data", family=FAMILY, checked="brute force")
def _loop():
    def apply_fn(p, x):
        return mlp(p, lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), PLAIN)

    def twin(p, x, tap):
        return mlp(p, jnp.sin(jnp.sin(jnp.sin(x))), tap)

    return Case(classifier(apply_fn), mlp_params(), (normal(1, 4, 4), labels(2, 4)), twin)


@program("a model written for one example, under vmap", family=FAMILY, checked="brute force")
def _vmapped():
    objective = classifier(lambda p, x: jax.vmap(lambda row: mlp(p, row, PLAIN))(x))
    return Case(objective, mlp_params(), (normal(1, 4, 4), labels(2, 4)), mlp)


LIBRARIES = "Models of Flax, Haiku and others"


@program("Linen: convolution, pooling, dense", family=LIBRARIES, checked="gradient")
def _linen_cnn():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(4, (3, 3), param_dtype=jnp.float64)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
            return nn.Dense(3, param_dtype=jnp.float64)(x)

    net, x = Net(), normal(1, 3, 6, 6, 2)
    params = net.init(jax.random.key(0), x)
    return Case(classifier(net.apply), params, (x, labels(2, 3)))


@program("NNX: GRU cell over time", family=LIBRARIES, checked="gradient")
def _nnx_gru():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.cell = nnx.RNN(nnx.GRUCell(3, 4, rngs=rngs, param_dtype=jnp.float64))
            self.head = nnx.Linear(4, 3, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x):
            return self.head(self.cell(x)[:, -1])

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)))
    return Case(classifier(apply_fn), params, (normal(1, 2, 4, 3), labels(2, 2)))


@program("Haiku: LSTM over time", family=LIBRARIES, checked="gradient")
def _haiku_lstm():
    def forward(x):
        core = hk.LSTM(4)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.Linear(3)(y[:, -1])

    net = hk.without_apply_rng(hk.transform(forward))
    x = normal(1, 2, 4, 3)
    return Case(classifier(net.apply), net.init(jax.random.key(0), x), (x, labels(2, 2)))
