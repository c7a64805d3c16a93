"""Programs whose calls change a state, draw random numbers, or take several inputs."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkfac as jk
from tests._programs import labels, normal
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
