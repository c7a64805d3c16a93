"""Recurrent cells of Flax in a scan over time, and other weights used many times.

One block for each parameter: rows of every time step under expand, the mean input and the
summed gradient over time under reduce.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._cases import case
from tests._checks import check
from tests._programs import labels, normal, tree

# Flax mixes float32 constants into float64.
pytestmark = [pytest.mark.exhaustive, pytest.mark.standard_promotion]

SHARINGS = ("expand", "reduce")
D, H, S = 3, 4, 3  # inputs, hidden units, time steps


def lstm(carry, x, dense):
    """One step; ``dense(name, x)`` is a layer with the bias that Flax gives it."""
    c, h = carry
    i, f, g, o = (dense(f"i{gate}", x) + dense(f"h{gate}", h) for gate in "ifgo")
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def gru(h, x, dense):
    r = jax.nn.sigmoid(dense("ir", x) + dense("hr", h))
    z = jax.nn.sigmoid(dense("iz", x) + dense("hz", h))
    n = jnp.tanh(dense("in", x) + r * dense("hn", h))
    return (1 - z) * n + z * h


def unrolled(cell):
    """The cell over time with taps, and a dense head on the last hidden state."""

    def plain(p, x, tap):
        layers = p["cell"]

        def dense(name, x):
            name = name if name in layers else f"{name}_"  # NNX's if_
            kernel, bias = layers[name]["kernel"], layers[name].get("bias")
            y = x @ kernel if bias is None else x @ kernel + bias
            return tap.dense(f"cell/{name}/kernel", x, y, bias=bias is not None)

        zeros = jnp.zeros((x.shape[0], H), x.dtype)
        carry = (zeros, zeros) if cell is lstm else zeros
        for t in range(x.shape[1]):
            carry = cell(carry, x[:, t], dense)
        h = carry[1] if cell is lstm else carry
        return tap.dense("head", h, h @ p["head"])

    return plain


def random_biases(layers):
    """Flax starts biases at zero, which would hide a wrong one."""
    leaves, structure = jax.tree.flatten(layers)
    return structure.unflatten([normal(7 + i, *leaf.shape) for i, leaf in enumerate(leaves)])


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name, cell", [("LSTMCell", lstm), ("GRUCell", gru)])
def test_linen_cells(x64, name, cell, sharing):
    net = nn.RNN(getattr(nn, name)(H, param_dtype=jnp.float64))
    x, y = normal(1, 2, S, D, scale=1.0), labels(2, 2)
    layers = net.init(jax.random.key(0), x)["params"]["cell"]
    params = {"cell": random_biases(layers), "head": normal(3, H, 3)}

    def model(p, x, tap):
        return net.apply({"params": {"cell": p["cell"]}}, x)[:, -1] @ p["head"]

    *_, factors = check(model, params, (x, y), oracle_model=unrolled(cell), sharing=sharing)
    assert all(layer.stack == () for layer in factors.layers)
    inputs = {
        factors.layer(f"cell/i{gate}/kernel").input for gate in ("f" if cell is lstm else "r")
    }
    assert len(inputs) == 1


def fused_gru(p, x, tap):
    """As in `nnx.GRUCell`: the three gates of each side in one product."""
    h = jnp.zeros((x.shape[0], H), x.dtype)
    for t in range(x.shape[1]):
        i, j = p["cell"]["dense_i"], p["cell"]["dense_h"]
        a = tap.dense("cell/dense_i/kernel", x[:, t], x[:, t] @ i["kernel"] + i["bias"], bias=True)
        b = tap.dense("cell/dense_h/kernel", h, h @ j["kernel"])
        (ar, az, an), (br, bz, bn) = jnp.split(a, 3, axis=-1), jnp.split(b, 3, axis=-1)
        z = jax.nn.sigmoid(az + bz)
        h = (1 - z) * jnp.tanh(an + jax.nn.sigmoid(ar + br) * bn) + z * h
    return tap.dense("head", h, h @ p["head"])


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell"])
def test_nnx_cells(x64, name, sharing):
    net = nnx.RNN(getattr(nnx, name)(D, H, param_dtype=jnp.float64, rngs=nnx.Rngs(0)))
    run, layers = jk.from_nnx(net)
    params = {"cell": random_biases(layers["cell"]), "head": normal(3, H, 3)}
    x, y = normal(1, 2, S, D, scale=1.0), labels(2, 2)

    def model(p, x, tap):
        return run({"cell": p["cell"]}, x)[:, -1] @ p["head"]

    plain = unrolled(lstm) if name == "LSTMCell" else fused_gru
    check(model, params, (x, y), oracle_model=plain, sharing=sharing)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", ["mc", "exact"])
def test_every_step_has_a_term_and_the_past_is_mixed(x64, fisher, sharing):
    """Outputs at every step: a term's gradient reaches all earlier uses of the weights."""

    def model(p, x, tap):
        def step(h, x):
            h = jnp.tanh(x @ p["w"] + h @ p["u"])
            return h, h @ p["v"]

        return jnp.swapaxes(
            lax.scan(step, jnp.zeros((x.shape[0], H), x.dtype), jnp.swapaxes(x, 0, 1))[1], 0, 1
        )

    def plain(p, x, tap):
        h, outputs = jnp.zeros((x.shape[0], H), x.dtype), []
        for t in range(x.shape[1]):
            a = tap.dense("w", x[:, t], x[:, t] @ p["w"])
            h = jnp.tanh(a + tap.dense("u", h, h @ p["u"]))
            outputs.append(tap.dense("v", h, h @ p["v"]))
        return jnp.stack(outputs, axis=1)

    p = tree(101, w=(D, H), u=(H, H), v=(H, 3))
    x, y = normal(1, 2, S, D, scale=1.0), labels(2, 2, S)
    drawn = labels(3, 2, 2, S) if fisher == "mc" else None
    check(
        model, p, (x, y), oracle_model=plain, fisher=fisher, sharing=sharing, labels=drawn
    )  # fmt: skip


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_scan_over_time_inside_a_scan_over_layers(x64, sharing):
    """Stacked over layers, constant over time."""

    def cell(w, x):
        step = lambda h, x: ((h := jnp.tanh(x @ w["w"] + h @ w["u"] + w["b"])), h)
        h = jnp.zeros((x.shape[0], H), x.dtype)
        return jnp.swapaxes(lax.scan(step, h, jnp.swapaxes(x, 0, 1))[1], 0, 1)

    def model(p, x, tap):
        x, _ = lax.scan(lambda x, w: (x + cell(w, x), None), x, p["cells"])
        return x[:, -1] @ p["head"]

    def plain(p, x, tap):
        for i in range(2):
            w = jax.tree.map(lambda v, i=i: v[i], p["cells"])
            h, outputs = jnp.zeros((x.shape[0], H), x.dtype), []
            for t in range(x.shape[1]):
                z = tap.dense("cells/w", x[:, t], x[:, t] @ w["w"], at=(i,))
                z = z + tap.dense("cells/u", h, h @ w["u"], at=(i,))
                h = jnp.tanh(tap.lone_bias("cells/b", z + w["b"], shape=(H,), at=(i,)))
                outputs.append(h)
            x = x + jnp.stack(outputs, axis=1)
        return tap.dense("head", x[:, -1], x[:, -1] @ p["head"])

    p = tree(102, cells__w=(2, H, H), cells__u=(2, H, H), cells__b=(2, H), head=(H, 3))
    batch = (normal(1, 2, S, H, scale=1.0), labels(2, 2))
    *_, factors = check(model, p, batch, oracle_model=plain, sharing=sharing)
    assert factors["cells/u"].a.shape == (2, H, H)


def test_looped_and_written_out_programs_have_the_same_factors(x64):
    """The library on both forms, rather than on the loop alone."""
    model, plain, params, batch = case("shared layers")
    for sharing in SHARINGS:
        results = [
            check(program, params, batch, oracle_model=plain, sharing=sharing)[2]
            for program in (model, plain)
        ]
        for layer in results[0]:
            for x, y in zip(results[0][layer], results[1][layer], strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-14)
