"""Programs that were covered from the first release on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
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
    rms,
    scanned,
    scanned_params,
    tree,
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


def bilinear(apply_fn, twin):
    params = tree(0, w=(4, 3, 5), head=(5, 3))
    batch = ((normal(1, 6, 4), normal(2, 6, 3)), labels(3, 6))

    def model(p, inputs, tap):
        y = jnp.tanh(twin(p["w"], *inputs, tap))
        return tap.dense("head", y, y @ p["head"])

    objective = classifier(lambda p, x, z: jnp.tanh(apply_fn(p["w"], x, z)) @ p["head"])
    return Case(objective, params, batch, model)


@program("a bilinear layer, x W z in one einsum", family=FAMILY, checked="brute force")
def _bilinear():
    """JAX multiplies the inputs first: a row is all products of an entry of x and one of z."""

    def twin(w, x, z, tap):
        rows = jnp.einsum("ni,nj->nij", x, z)
        return tap.dense("w", rows, jnp.einsum("nij,ijk->nk", rows, w), in_axes=2)

    return bilinear(lambda w, x, z: jnp.einsum("ni,ijk,nj->nk", x, w, z), twin)


@program("a bilinear layer, x W and then z", family=FAMILY, checked="brute force")
def _one_by_one():
    """Rows of x meet the kernel, which gives an axis of z and one of the outputs."""

    def twin(w, x, z, tap):
        y = tap.dense("w", x, jnp.einsum("ni,ijk->njk", x, w))
        return jnp.einsum("njk,nj->nk", y, z)

    return bilinear(
        lambda w, x, z: jnp.einsum("njk,nj->nk", jnp.einsum("ni,ijk->njk", x, w), z), twin
    )


@program("attention with a bias for each head and relative position", family=FAMILY,
         checked="brute force")  # fmt: skip
def _relative_positions():
    distance = jnp.arange(4)[None] - jnp.arange(4)[:, None] + 3

    def attend(p, x, bias, tap):
        q, k, v = jnp.split(tap.dense("qkv", x, x @ p["qkv"]), 3, -1)
        q, k, v = (t.reshape(*x.shape[:2], 2, 3) for t in (q, k, v))
        mix = jnp.einsum("nshk,nthk->nsth", q, k) + bias
        y = jnp.einsum("nsth,nthk->nshk", jax.nn.softmax(mix, 2), v).reshape(*x.shape[:2], 6)
        return tap.dense("head", y, y @ p["head"])

    def apply_fn(p, x):
        return attend(p, x, p["bias"][distance], PLAIN)

    def twin(p, x, tap):
        """Every query and key has a row of its own, zero but at its distance."""
        y = jnp.broadcast_to(p["bias"], (len(x), 4, 4, 7, 2))
        y = tap.lone_bias("bias", y, shape=(7, 2))
        return attend(p, x, jnp.einsum("nstdh,std->nsth", y, jnp.eye(7)[distance]), tap)

    params = tree(0, qkv=(4, 18), bias=(7, 2), head=(6, 3))
    return Case(classifier(apply_fn), params, (normal(1, 2, 4, 4), labels(2, 2, 4)), twin)


@program("embeddings of words, positions and token types (BERT)", family=FAMILY,
         checked="brute force")  # fmt: skip
def _three_tables():
    """Without token types given, Flax's BERT makes zeros of the batch's shape."""

    def model(p, ids, tap):
        at, types = jnp.broadcast_to(jnp.arange(3), ids.shape), jnp.zeros_like(ids)
        rows = (("words", ids), ("at", at), ("types", types))
        x = sum(tap.embedding(k, row, p[k][row], size=len(p[k])) for k, row in rows)
        x = tap.scale("norm", rms(x), rms(x) * p["norm"], shape=(4,))
        return tap.dense("head", x, x @ p["head"])

    params = tree(0, words=(7, 4), at=(5, 4), types=(2, 4), norm=(4,), head=(4, 3))
    batch = (labels(1, 2, 3, classes=7), labels(2, 2, 3))
    return Case(objective_of(model), params, batch, model)


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
