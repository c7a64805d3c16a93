"""Programs that transform their parameters before these meet data."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxkfac as jk
from tests._checks import objective_of
from tests._oracle import Block
from tests._programs import labels, mlp, mlp_params, normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program

FUNCTIONS = "Functions of a parameter, element by element"
PARTS = "Parameters that are parts of one array, and parts of one"


def classifier(apply_fn):
    return jk.Objective(apply_fn, jk.Categorical())


def rows(n=6, i=4):
    return normal(8, n, i), labels(9, n)


def tokens(i=4):
    return normal(8, 2, 3, i), labels(9, 2, 3)


def times(tap, name, x, value, derivative, row_axes=None):
    """``x`` times a function of a parameter, whose rows are ``x`` times its derivative."""
    x_times = x * derivative
    zeros = jnp.zeros_like(x_times)
    y = tap.scale(name, x_times, zeros, shape=derivative.shape, row_axes=row_axes)
    return x * value + y


# ------------------------------------------------------------------ functions


@program("temperature: exp(logit_scale) times logits", family=FUNCTIONS, checked="brute force")
def _temperature():
    def model(p, x, tap):
        y = tap.dense("head", x, x @ p["head"])
        scale = jnp.exp(p["logit_scale"])
        return times(tap, "logit_scale", y, scale, scale, row_axes=y.ndim - 1)  # classes are none

    params = {"head": normal(0, 4, 3), "logit_scale": normal(1)}
    return Case(objective_of(model), params, rows(), model)


@program(
    "softplus scale, tanh gate, division by exp(log_std)", family=FUNCTIONS, checked="brute force"
)
def _gates():
    def apply_fn(p, x):
        x = jnp.tanh(x @ p["w"]) * jax.nn.softplus(p["rho"]) / jnp.exp(p["log_std"])
        return (x * jnp.tanh(p["gate"])) @ p["head"]

    def twin(p, x, tap):
        x = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        x = times(tap, "rho", x, jax.nn.softplus(p["rho"]), jax.nn.sigmoid(p["rho"]))
        x = times(tap, "log_std", x, jnp.exp(-p["log_std"]), -jnp.exp(-p["log_std"]))
        x = times(tap, "gate", x, jnp.tanh(p["gate"]), 1 - jnp.tanh(p["gate"]) ** 2)
        return tap.dense("head", x, x @ p["head"])

    params = tree(0, w=(4, 5), rho=(5,), log_std=(5,), gate=(5,), head=(5, 3))
    return Case(classifier(apply_fn), params, rows(), twin)


@program("powers: a gain squared, a length to the power -1/2", family=FUNCTIONS,
         checked="brute force")  # fmt: skip
def _powers():
    def apply_fn(p, x):
        return (x * p["gain"] ** 2 * (1 + p["length"] ** 2) ** -0.5) @ p["head"]

    def twin(p, x, tap):
        x = times(tap, "gain", x, p["gain"] ** 2, 2 * p["gain"])
        inner = 1 + p["length"] ** 2
        x = times(tap, "length", x, inner**-0.5, -p["length"] * inner**-1.5)
        return tap.dense("head", x, x @ p["head"])

    return Case(classifier(apply_fn), tree(0, gain=(4,), length=(4,), head=(4, 3)), rows(), twin)


@program(
    "a parameter that enters twice: w times sigmoid(w)", family=FUNCTIONS, checked="brute force"
)
def _twice():
    def twin(p, x, tap):
        s = jax.nn.sigmoid(p["w"])
        x = times(tap, "w", x, p["w"] * s, s + p["w"] * s * (1 - s))
        return tap.dense("head", x, x @ p["head"])

    objective = classifier(lambda p, x: (x * (p["w"] * jax.nn.sigmoid(p["w"]))) @ p["head"])
    return Case(objective, tree(0, w=(4,), head=(4, 3)), rows(), twin)


@program("two parameters times each other", family=FUNCTIONS, checked="brute force")
def _product():
    def twin(p, x, tap):
        x = times(tap, "u", x, 0.0, p["v"]) + times(tap, "v", x, p["u"] * p["v"], p["u"])
        return tap.dense("head", x, x @ p["head"])

    objective = classifier(lambda p, x: (x * (p["u"] * p["v"])) @ p["head"])
    return Case(objective, tree(0, u=(4,), v=(4,), head=(4, 3)), rows(), twin)


@program(
    "Mamba's decay -exp(A_log) in a selective scan",
    family=FUNCTIONS,
    checked="brute force, unrolled",
)
def _mamba():
    def apply_fn(p, x):
        decay = -jnp.exp(p["A_log"])

        def step(h, u):
            dt = jax.nn.softplus(u @ p["dt"])[..., None]
            h = jnp.exp(dt * decay) * h + dt * (u @ p["b"])[:, None, :] * u[..., None]
            return h, jnp.sum(h * (u @ p["c"])[:, None, :], -1) + u * p["D"]

        h = jnp.zeros((x.shape[0], *p["A_log"].shape), x.dtype)
        _, y = lax.scan(jax.checkpoint(step), h, jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(y, 0, 1) @ p["head"]

    def twin(p, x, tap):
        decay, h, ys = -jnp.exp(p["A_log"]), jnp.zeros((x.shape[0], *p["A_log"].shape)), []
        for u in jnp.swapaxes(x, 0, 1):
            dt = jax.nn.softplus(tap.dense("dt", u, u @ p["dt"]))[..., None]
            b, c = (tap.dense(name, u, u @ p[name])[:, None, :] for name in ("b", "c"))
            h = jnp.exp(times(tap, "A_log", dt, decay, decay)) * h + dt * b * u[..., None]
            ys.append(jnp.sum(h * c, -1) + times(tap, "D", u, p["D"], jnp.ones(4)))
        y = jnp.stack(ys, 1)
        return tap.dense("head", y, y @ p["head"])

    params = tree(0, A_log=(4, 2), D=(4,), dt=(4, 4), b=(4, 2), c=(4, 2), head=(4, 3))
    return Case(classifier(apply_fn), params, tokens(), twin)


@program(
    "softplus(W) as a kernel",
    family=FUNCTIONS,
    checked="squares of each row's gradient",
    unchecked=("head", "w@effective"),
)
def _softplus_kernel():
    objective = classifier(lambda p, x: jnp.tanh(x @ jax.nn.softplus(p["w"])) @ p["head"])
    params, batch = tree(0, w=(4, 5), head=(5, 3)), rows()
    alone = jax.tree.map(lambda v: v[:, None], batch)
    each = jax.vmap(jax.grad(objective), (None, 0))(params, alone)["w"]
    diagonal = (each**2).mean(0)
    return Case(objective, params, batch, factors={"w": Block("scale", None, None, diagonal)})


# ------------------------------------------------------------------ parts


def _attention_twin(p, x, tap):
    q, k, v = (tap.dense(name, x, x @ p[name]) for name in "qkv")
    y = q * jnp.tanh(k) + v
    return tap.dense("head", y, y @ p["head"])


def _qkv(fused):
    def apply_fn(p, x):
        q, k, v = fused(p, x)
        return (q * jnp.tanh(k) + v) @ p["head"]

    params = tree(0, q=(4, 5), k=(4, 5), v=(4, 5), head=(5, 3))
    return Case(classifier(apply_fn), params, tokens(), _attention_twin)


@program("q, k, v concatenated into one product", family=PARTS, checked="brute force")
def _fused():
    return _qkv(lambda p, x: jnp.split(x @ jnp.concatenate([p[n] for n in "qkv"], 1), 3, -1))


@program("q, k, v stacked into one einsum", family=PARTS, checked="brute force")
def _stacked():
    return _qkv(lambda p, x: jnp.einsum("nsi,kio->knso", x, jnp.stack([p[n] for n in "qkv"])))


@program("parameters as one flat vector", family=PARTS, checked="brute force of the tree")
def _flat():
    params = mlp_params()
    flat, unravel = ravel_pytree(params)
    names = {"up/kernel": "[23:43]", "down/kernel": "[3:18]"}

    class Renamed:
        def __init__(self, tap):
            self.tap = tap

        def dense(self, name, *args, **options):
            return self.tap.dense(names[name], *args, **options)

    def twin(p, x, tap):
        return mlp(unravel(p), x, Renamed(tap))

    return Case(classifier(lambda p, x: mlp(unravel(p), x, PLAIN)), flat, rows(), twin)


@program("a list of layers stacked for a scan", family=PARTS, checked="brute force, unrolled")
def _lists():
    def apply_fn(p, x):
        def step(x, w):
            return x + jnp.tanh((x * jnp.exp(w["s"])) @ w["k"] + w["b"]), None

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *p["layers"])
        return lax.scan(jax.checkpoint(step), x, stacked)[0] @ p["head"]

    def twin(p, x, tap):
        for i, w in enumerate(p["layers"]):
            z = times(tap, f"layers/{i}/s", x, jnp.exp(w["s"]), jnp.exp(w["s"]))
            y = tap.dense(f"layers/{i}/k", z, z @ w["k"] + w["b"], bias=True)
            x = x + jnp.tanh(y)
        return tap.dense("head", x, x @ p["head"])

    layers = [tree(i, k=(4, 4), b=(4,), s=(4,)) for i in range(3)]
    return Case(classifier(apply_fn), {"layers": layers, "head": normal(5, 4, 3)}, tokens(), twin)


@program("halves of one kernel, sliced", family=PARTS, checked="brute force")
def _halves():
    def twin(p, x, tap):
        up, gate = p["w"][:, :3], p["w"][:, 3:]
        y = tap.dense("w[:,0:3]", x, x @ up) * jnp.tanh(tap.dense("w[:,3:6]", x, x @ gate))
        return tap.dense("head", y, y @ p["head"])

    objective = classifier(lambda p, x: twin(p, x, PLAIN))
    return Case(objective, tree(0, w=(4, 6), head=(3, 3)), rows(), twin)


@program("a kernel under a constant mask, and a triangle", family=PARTS, checked="brute force")
def _masked():
    mask = (normal(7, 4, 5) > 0).astype(jnp.float64)

    def model(p, x, tap):
        y = jnp.tanh(tap.dense("w", x, x @ (mask * p["w"])))
        y = jnp.tanh(tap.dense("t", y, y @ jnp.tril(p["t"])))
        return tap.dense("head", y, y @ p["head"])

    return Case(objective_of(model), tree(0, w=(4, 5), t=(5, 5), head=(5, 3)), rows(), model)


@program("an embedding read by columns", family=PARTS, checked="brute force")
def _columns():
    def model(p, ids, tap):
        y = tap.embedding("e", ids, jnp.moveaxis(p["e"][:, ids], 0, -1), size=7)
        return tap.dense("head", y, y @ p["head"])

    batch = (labels(3, 2, 3, classes=7), labels(9, 2, 3))
    return Case(objective_of(model), tree(0, e=(4, 7), head=(4, 3)), batch, model)


@program("a kernel padded to a multiple of eight", family=PARTS, checked="brute force")
def _padded():
    def apply_fn(p, x):
        w = jnp.pad(p["w"], ((0, 4), (0, 3)))
        return (jnp.tanh(jnp.pad(x, ((0, 0), (0, 4))) @ w))[:, :5] @ p["head"]

    def twin(p, x, tap):
        y = jnp.tanh(tap.dense("w", x, x @ p["w"]))
        return tap.dense("head", y, y @ p["head"])

    return Case(classifier(apply_fn), tree(0, w=(4, 5), head=(5, 3)), rows(), twin)
