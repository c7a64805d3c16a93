"""Recurrent cells over time, of Flax, Haiku, Equinox and plain JAX."""

import dataclasses

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._oracle import Block, oracle
from tests._programs import labels, normal, tree
from tests._taps import PLAIN, patches
from tests.recurrent_test import D, H, S, fused_gru, gru, lstm, random_biases, unrolled
from tests.zoo import Case, program

FAMILY = "Recurrent cells"
BRUTE = "brute force, unrolled"


def over_time(last, cell, twin):
    """A case of ``last(cell, sequences)``, the last hidden state, under a dense head."""
    params = {"cell": random_biases(cell), "head": normal(3, H, 3)}
    objective = jk.Objective(lambda p, x: last(p["cell"], x) @ p["head"], jk.Categorical())
    return Case(objective, params, (normal(1, 2, S, D, scale=1.0), labels(2, 2)), twin)


def linen(cell, twin):
    net = nn.RNN(cell(H, param_dtype=jnp.float64))
    params = net.init(jax.random.key(0), jnp.zeros((1, S, D)))["params"]["cell"]
    last = lambda p, x: net.apply({"params": {"cell": p}}, x)[:, -1]
    return over_time(last, params, twin)


@program("Linen: LSTMCell", family=FAMILY, checked=BRUTE)
def _linen_lstm():
    return linen(nn.LSTMCell, unrolled(lstm))


@program("Linen: GRUCell", family=FAMILY, checked=BRUTE)
def _linen_gru():
    return linen(nn.GRUCell, unrolled(gru))


@program("Linen: OptimizedLSTMCell", family=FAMILY, checked=BRUTE)
def _linen_optimized():
    """Its kernels are joined into one product, and have factors one by one."""
    return linen(nn.OptimizedLSTMCell, unrolled(lstm))


def of_nnx(cell, twin):
    net = nnx.RNN(cell(D, H, param_dtype=jnp.float64, rngs=nnx.Rngs(0)))
    apply_fn, params = jk.from_nnx(net)
    return over_time(lambda p, x: apply_fn({"cell": p}, x)[:, -1], params["cell"], twin)


@program("NNX: LSTMCell", family=FAMILY, checked=BRUTE)
def _nnx_lstm():
    return of_nnx(nnx.LSTMCell, unrolled(lstm))


def fused_lstm(p, xs, tap):
    """As in `nnx.OptimizedLSTMCell`: the four gates of each side in one product."""
    c = h = jnp.zeros((len(xs), H))
    i, j = p["cell"]["dense_i"], p["cell"]["dense_h"]
    for x in jnp.swapaxes(xs, 0, 1):
        gates = tap.dense("cell/dense_i/kernel", x, x @ i["kernel"])
        y = h @ j["kernel"] + j["bias"]
        gates = jnp.split(gates + tap.dense("cell/dense_h/kernel", h, y, bias=True), 4, -1)
        c = jax.nn.sigmoid(gates[1]) * c + jax.nn.sigmoid(gates[0]) * jnp.tanh(gates[2])
        h = jax.nn.sigmoid(gates[3]) * jnp.tanh(c)
    return tap.dense("head", h, h @ p["head"])


@program("NNX: OptimizedLSTMCell", family=FAMILY, checked=BRUTE)
def _nnx_optimized():
    return of_nnx(nnx.OptimizedLSTMCell, fused_lstm)


@program("NNX: GRUCell", family=FAMILY, checked=BRUTE)
def _nnx_gru():
    return of_nnx(nnx.GRUCell, fused_gru)


def haiku(core, twin):
    """A core over time; Haiku's own names stand below ``cell``."""

    def forward(x):
        net = core(H)
        y, _ = hk.dynamic_unroll(net, x, net.initial_state(len(x)), time_major=False)
        return y[:, -1]

    net = hk.without_apply_rng(hk.transform(forward))
    return over_time(net.apply, net.init(jax.random.key(0), jnp.zeros((1, S, D))), twin)


@program("Haiku: LSTM", family=FAMILY, checked=BRUTE)
def _haiku_lstm():
    """Haiku adds one to the forget gate, and multiplies inputs and state joined."""

    def twin(p, xs, tap):
        c = h = jnp.zeros((len(xs), H))
        layer = p["cell"]["lstm/linear"]
        for x in jnp.swapaxes(xs, 0, 1):
            both = jnp.concatenate([x, h], -1)
            y = tap.dense("cell/lstm/linear/w", both, both @ layer["w"] + layer["b"], bias=True)
            i, g, f, o = jnp.split(y, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return tap.dense("head", h, h @ p["head"])

    return haiku(hk.LSTM, twin)


@program("Haiku: GRU", family=FAMILY, checked=BRUTE)
def _haiku_gru():
    """Two parts of one kernel multiply different rows; the bias's parts are one diagonal."""
    parts = {"[:,0:8]": slice(0, 2 * H), "[:,8:12]": slice(2 * H, 3 * H)}

    def twin(p, xs, tap):
        h, w = jnp.zeros((len(xs), H)), p["cell"]["gru"]

        def gate(name, x, h):
            part = parts[name]
            y = x[:, part] + tap.dense(f"cell/gru/w_h{name}", h, h @ w["w_h"][:, part])
            return tap.lone_bias(f"b{name}", y + w["b"][part], shape=w["b"][part].shape)

        zr, a = parts
        for x in jnp.swapaxes(xs, 0, 1):
            x = tap.dense("cell/gru/w_i", x, x @ w["w_i"])
            z, r = jnp.split(jax.nn.sigmoid(gate(zr, x, h)), 2, -1)
            h = (1 - z) * h + z * jnp.tanh(gate(a, x, r * h))
        return tap.dense("head", h, h @ p["head"])

    case = haiku(hk.GRU, None)
    factors = oracle(twin, case.params, case.batch)
    diagonal = np.concatenate([factors.pop(f"b{name}").diagonal for name in parts])
    factors["cell/gru/b"] = Block("bias", None, None, diagonal)
    return dataclasses.replace(case, factors=factors)


def equinox(cell, start, twin):
    """A cell for one example at one time, in a scan under vmap; ``start`` makes its state."""
    params, rest = eqx.partition(cell(D, H, key=jax.random.key(0)), eqx.is_inexact_array)

    def last(p, x):
        step = lambda h, x: (eqx.combine(p, rest)(x, h), None)
        h, _ = lax.scan(step, start(jnp.zeros(H)), x)
        return jax.tree.leaves(h)[0]

    return over_time(lambda p, x: jax.vmap(last, (None, 0))(p, x), params, twin)


@program("Equinox: LSTMCell", family=FAMILY, checked=BRUTE)
def _equinox_lstm():
    def twin(p, xs, tap):
        c = h = jnp.zeros((len(xs), H))
        cell = p["cell"]
        for x in jnp.swapaxes(xs, 0, 1):
            y = tap.dense("cell/weight_ih", x, x @ cell.weight_ih.T)
            y = y + tap.dense("cell/weight_hh", h, h @ cell.weight_hh.T)
            y = tap.lone_bias("cell/bias", y + cell.bias, shape=(4 * H,))
            i, f, g, o = jnp.split(y, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return tap.dense("head", h, h @ p["head"])

    return equinox(eqx.nn.LSTMCell, lambda h: (h, h), twin)


@program("Equinox: GRUCell", family=FAMILY, checked=BRUTE)
def _equinox_gru():
    def twin(p, xs, tap):
        h, cell = jnp.zeros((len(xs), H)), p["cell"]
        for x in jnp.swapaxes(xs, 0, 1):
            a = x @ cell.weight_ih.T + cell.bias
            a = jnp.split(tap.dense("cell/weight_ih", x, a, bias=True), 3, -1)
            b = jnp.split(tap.dense("cell/weight_hh", h, h @ cell.weight_hh.T), 3, -1)
            n = tap.lone_bias("cell/bias_n", b[2] + cell.bias_n, shape=(H,))
            n = jnp.tanh(a[2] + jax.nn.sigmoid(a[0] + b[0]) * n)
            h = n + jax.nn.sigmoid(a[1] + b[1]) * (h - n)
        return tap.dense("head", h, h @ p["head"])

    return equinox(eqx.nn.GRUCell, lambda h: h, twin)


# ------------------------------------------------------------------ images over time


def convolved(tap, name, x, kernel, bias):
    """A convolution that keeps the size, and its tap."""
    y = lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = y if bias is None else y + bias
    if tap is PLAIN:
        return y
    rows = patches(x, kernel.shape[:2], None, ((1, 1), (1, 1)))
    return tap.dense(name, rows, y, in_axes=3, bias=bias is not None)


@program("Linen: ConvLSTMCell", family=FAMILY, checked=BRUTE)
def _linen_convolutions():
    net = nn.RNN(nn.ConvLSTMCell(2, (3, 3), param_dtype=jnp.float64))
    x = normal(1, 2, S, 4, 4, 2, scale=1.0)
    params = {"cell": random_biases(net.init(jax.random.key(0), x)["params"]["cell"])}
    params["head"] = normal(3, 2, 3)

    def apply_fn(p, x):
        return net.apply({"params": {"cell": p["cell"]}}, x)[:, -1].mean((1, 2)) @ p["head"]

    def twin(p, xs, tap):
        c = h = jnp.zeros((len(xs), 4, 4, 2))
        for x in jnp.swapaxes(xs, 0, 1):
            gates = sum(
                convolved(
                    tap, f"cell/{name}/kernel", rows, *map(p["cell"][name].get, ("kernel", "bias"))
                )
                for name, rows in (("ih", x), ("hh", h))
            )
            i, g, f, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        h = h.mean((1, 2))
        return tap.dense("head", h, h @ p["head"])

    return Case(jk.Objective(apply_fn, jk.Categorical()), params, (x, labels(2, 2)), twin)


@program("ConvLSTM with peepholes, in a scan", family=FAMILY, checked=BRUTE)
def _peepholes():
    """The gates see the memory through a weight of each place and channel."""

    def step(p, carry, x, tap):
        c, h = carry
        look = lambda name, c: tap.scale(name, c, c * p[name], shape=c.shape[1:])
        y = convolved(tap, "x", x, p["x"], None) + convolved(tap, "h", h, p["h"], None)
        i, f, g, o = jnp.split(tap.lone_bias("b", y + p["b"], shape=(8,)), 4, -1)
        i, f = jax.nn.sigmoid(i + look("ci", c)), jax.nn.sigmoid(f + look("cf", c))
        c = f * c + i * jnp.tanh(g)
        return c, jax.nn.sigmoid(o + look("co", c)) * jnp.tanh(c)

    def head(p, h, tap):
        h = h.mean((1, 2))
        return tap.dense("head", h, h @ p["head"])

    def apply_fn(p, x):
        zeros = jnp.zeros((len(x), 4, 4, 2))
        start, x = (zeros, zeros), jnp.swapaxes(x, 0, 1)
        (_, h), _ = lax.scan(lambda carry, x: (step(p, carry, x, PLAIN), None), start, x)
        return head(p, h, PLAIN)

    def twin(p, xs, tap):
        carry = (jnp.zeros((len(xs), 4, 4, 2)),) * 2
        for x in jnp.swapaxes(xs, 0, 1):
            carry = step(p, carry, x, tap)
        return head(p, carry[1], tap)

    params = tree(
        4, x=(3, 3, 2, 8), h=(3, 3, 2, 8), b=(8,), ci=(4, 4, 2), cf=(4, 4, 2), co=(4, 4, 2),
        head=(2, 3),
    )  # fmt: skip
    batch = (normal(1, 2, S, 4, 4, 2, scale=1.0), labels(2, 2))
    return Case(jk.Objective(apply_fn, jk.Categorical()), params, batch, twin)
