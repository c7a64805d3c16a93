"""Weights that are computed from parameters before they meet data."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jaxkfac as jk
from tests._checks import objective_of, squares
from tests._convolutions import Convolution
from tests._programs import labels, normal, tree
from tests._taps import PLAIN
from tests.zoo._program import Case, program

COMPUTED = "Weights computed from parameters"
BRUTE = "brute force, squares of each example's gradient"


def computed(weight, shapes, name, *, behind=None, tokens=False):
    """A network whose first kernel is ``weight(p)``, (4, 5)."""

    def model(p, x, tap):
        w = weight(p)
        y = jnp.tanh(tap.dense(name, x, x @ w))
        return tap.dense("head", y, y @ p["head"])

    batch = (normal(8, 6, 4), labels(9, 6))
    if tokens:
        batch = (normal(8, 3, 2, 4), labels(9, 3, 2))
    params, objective = tree(0, **shapes, head=(5, 3)), objective_of(model)
    diagonals = squares(objective, params, batch, shapes if behind is None else behind)
    return Case(objective, params, batch, model, diagonals)


def weight_norm(p):
    return p["v"] / jnp.linalg.norm(p["v"], axis=0, keepdims=True) * p["g"]


@program("weight norm: v / norm(v) * g", family=COMPUTED, checked=BRUTE)
def _weight_norm():
    return computed(weight_norm, {"v": (4, 5), "g": (5,)}, "v@effective", tokens=True)


@program("weight standardisation", family=COMPUTED, checked=BRUTE)
def _standardised():
    def weight(p):
        mean, var = p["v"].mean(0, keepdims=True), p["v"].var(0, keepdims=True)
        return (p["v"] - mean) * lax.rsqrt(4 * var + 1e-4) * p["g"]

    return computed(weight, {"v": (4, 5), "g": (5,)}, "v@effective")


@program("spectral norm by power iteration in a loop", family=COMPUTED, checked=BRUTE)
def _spectral():
    def weight(p):
        def step(_, u):
            u = p["v"].T @ (p["v"] @ u)
            return u / jnp.linalg.norm(u)

        u = lax.fori_loop(0, 3, step, jnp.ones(5))
        return p["v"] / jnp.linalg.norm(p["v"] @ u)

    return computed(weight, {"v": (4, 5)}, "v@effective")


@program("merged adapter, its base frozen", family=COMPUTED, checked=BRUTE)
def _merged():
    base = normal(7, 4, 5)
    return computed(
        lambda p: base + 0.5 * (p["a"] @ p["b"]), {"a": (4, 2), "b": (2, 5)}, "b@effective"
    )


@program("merged adapter: W plus a product of two", family=COMPUTED, checked=BRUTE)
def _merged_and_trained():
    shapes = {"w": (4, 5), "a": (4, 2), "b": (2, 5)}
    return computed(lambda p: p["w"] + 0.5 * (p["a"] @ p["b"]), shapes, "w", behind=("a", "b"))


@program("a kernel times a softmax over its inputs", family=COMPUTED, checked=BRUTE)
def _softmax():
    shapes = {"m": (4, 5), "w": (4, 5)}
    return computed(lambda p: jax.nn.softmax(p["m"], 0) * p["w"], shapes, "m@effective")


@program("a kernel times a sigmoid mask", family=COMPUTED, checked=BRUTE)
def _sigmoid():
    shapes = {"m": (4, 5), "w": (4, 5)}
    return computed(lambda p: jax.nn.sigmoid(p["m"]) * p["w"], shapes, "m@effective")


@program("a kernel that is a product of parameters", family=COMPUTED, checked=BRUTE)
def _product():
    shapes = {"u": (4, 3), "s": (3,), "v": (3, 5)}
    return computed(lambda p: (p["u"] * p["s"]) @ p["v"], shapes, "v@effective")


@program("orthogonal kernel: exponential of a skew matrix", family=COMPUTED, checked=BRUTE)
def _orthogonal():
    def weight(p):
        skew = p["s"] - p["s"].T
        return jnp.linalg.solve(jnp.eye(5) + skew, jnp.eye(5) - skew)[:4]

    return computed(weight, {"s": (5, 5)}, "s@effective")


@program("kernel of a tiny network (HyperNetwork) of learned codes", family=COMPUTED, checked=BRUTE)
def _hyper():
    def weight(p):
        return jnp.tanh(p["code"] @ p["wide"]).reshape(4, 5)

    shapes = {"code": (2,), "wide": (2, 20)}
    return computed(
        lambda p: jnp.tanh(p["code"] @ p["wide"]).reshape(4, 5), shapes, "wide@effective"
    )


@program("cosine head: normalised features and kernel", family=COMPUTED, checked=BRUTE)
def _cosine():
    def model(p, x, tap):
        y = jnp.tanh(tap.dense("up", x, x @ p["up"]))
        y = y / jnp.linalg.norm(y, axis=-1, keepdims=True)
        w = p["head"] / jnp.linalg.norm(p["head"], axis=0, keepdims=True)
        y = tap.dense("head@effective", y, y @ w)
        return tap.scale("scale", 10 * y, 10 * y * p["scale"], shape=(), row_axes=y.ndim - 1)

    params = tree(0, up=(4, 5), head=(5, 3), scale=())
    batch, objective = (normal(8, 6, 4), labels(9, 6)), objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["head"]))


@program("weight norm inside scan of remat", family=COMPUTED, checked=BRUTE + ", unrolled")
def _scanned():
    def apply_fn(p, x):
        def step(x, w):
            kernel = w["v"] / jnp.linalg.norm(w["v"], axis=0) * w["g"]
            return x + jnp.tanh(x @ kernel), None

        return lax.scan(jax.checkpoint(step), x, p["layers"])[0] @ p["head"]

    def twin(p, x, tap):
        for i in range(3):
            v, g = p["layers"]["v"][i], p["layers"]["g"][i]
            y = x @ (v / jnp.linalg.norm(v, axis=0) * g)
            x = x + jnp.tanh(tap.dense("layers/v@effective", x, y, at=(i,)))
        return tap.dense("head", x, x @ p["head"])

    params = tree(0, layers__v=(3, 4, 4), layers__g=(3, 4), head=(4, 3))
    batch, objective = (
        (normal(8, 3, 2, 4), labels(9, 3, 2)),
        jk.Objective(apply_fn, jk.Categorical()),
    )
    flat = lambda p: {"layers": {"v": p["v"], "g": p["g"]}, "head": p["head"]}
    one = {"v": params["layers"]["v"], "g": params["layers"]["g"], "head": params["head"]}
    found = squares(lambda p, b: objective(flat(p), b), one, batch, ["v", "g"])
    diagonals = {f"layers/{name}": block for name, block in found.items()}
    return Case(objective, params, batch, twin, diagonals)


@program("a recurrent cell with weight norm", family=COMPUTED, checked=BRUTE + ", unrolled")
def _recurrent():
    def weight(p):
        return p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]

    def apply_fn(p, x):
        def step(h, x):
            return jnp.tanh(x @ p["in"] + h @ weight(p)), None

        h, _ = lax.scan(step, jnp.zeros((x.shape[0], 5)), x.swapaxes(0, 1))
        return h @ p["head"]

    def twin(p, x, tap):
        h = jnp.zeros((x.shape[0], 5))
        for t in range(x.shape[1]):
            rows = tap.dense("in", x[:, t], x[:, t] @ p["in"])
            h = jnp.tanh(rows + tap.dense("v@effective", h, h @ weight(p)))
        return tap.dense("head", h, h @ p["head"])

    params = tree(0, v=(5, 5), g=(5,), head=(5, 3)) | {"in": normal(3, 4, 5)}
    batch, objective = (normal(8, 6, 3, 4), labels(9, 6)), jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, batch, twin, squares(objective, params, batch, ["v", "g"]))


@program("convolution with standardised kernels (BiT)", family=COMPUTED, checked=BRUTE)
def _convolution():
    conv = Convolution(
        space=(4, 4), window=(3, 3), padding=((1, 1), (1, 1)), channels=(2, 3), bias=False
    )

    def model(p, x, tap):
        w = (p["k"] - p["k"].mean((0, 1, 2))) * lax.rsqrt(p["k"].var((0, 1, 2)) + 1e-5)
        y = conv(x, w)
        y = jnp.tanh(y if tap is PLAIN else conv.tapped(tap, "k@effective", x, y)).mean((1, 2))
        return tap.dense("head", y, y @ p["head"])

    params = tree(0, k=conv.kernel_shape(), head=(3, 3))
    batch, objective = (normal(1, 5, 4, 4, 2), labels(2, 5)), objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["k"]))


@program("embedding with normalised rows", family=COMPUTED, checked=BRUTE)
def _embedding():
    def model(p, ids, tap):
        e = p["e"] / jnp.linalg.norm(p["e"], axis=1, keepdims=True)
        y = tap.embedding("e@effective", ids, e[ids], size=7)
        return tap.dense("head", y, y @ p["head"])

    params, batch = tree(0, e=(7, 4), head=(4, 3)), (labels(3, 2, 3, classes=7), labels(9, 2, 3))
    objective = objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["e"]))


@program("convolution with softplus kernels", family=COMPUTED, checked=BRUTE)
def _softplus_convolution():
    conv = Convolution(space=(5,), window=(3,), padding=((0, 0),), channels=(2, 3), bias=False)

    def model(p, x, tap):
        w = jax.nn.softplus(p["k"])
        y = conv(x, w)
        y = jnp.tanh(y if tap is PLAIN else conv.tapped(tap, "k@effective", x, y)).mean(1)
        return tap.dense("head", y, y @ p["head"])

    params = tree(0, k=conv.kernel_shape(), head=(3, 3))
    batch, objective = (normal(1, 5, 5, 2), labels(2, 5)), objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["k"]))


@program("embedding of exponentials", family=COMPUTED, checked=BRUTE)
def _exponentials():
    def model(p, ids, tap):
        y = tap.embedding("e@effective", ids, jnp.exp(p["e"])[ids], size=7)
        return tap.dense("head", y, y @ p["head"])

    params, batch = tree(0, e=(7, 4), head=(4, 3)), (labels(3, 2, 3, classes=7), labels(9, 2, 3))
    objective = objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["e"]))


@program("two tables and padding joined into one embedding", family=COMPUTED, checked=BRUTE)
def _joined_tables():
    def model(p, ids, tap):
        e = jnp.pad(jnp.concatenate([p["old"], p["new"]]), ((1, 0), (0, 0)))
        y = tap.embedding("old@effective", ids, e[ids], size=8)
        return tap.dense("head", y, y @ p["head"])

    params = tree(0, old=(4, 4), new=(3, 4), head=(4, 3))
    batch = (labels(3, 2, 3, classes=8), labels(9, 2, 3))
    objective = objective_of(model)
    diagonals = squares(objective, params, batch, ["old", "new"])
    return Case(objective, params, batch, model, diagonals)


@program("a lookup that keeps its axis (named arrays)", family=COMPUTED, checked="brute force")
def _kept_axis():
    def lookup(table, ids):
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(0, 3), collapsed_slice_dims=(), start_index_map=(1,)
        )
        return lax.gather(table, ids[..., None], numbers, (4, 1), mode="clip")  # (4, n, s, 1)

    def model(p, ids, tap):
        y = jnp.moveaxis(lookup(p["e"], ids)[..., 0], 0, -1)
        y = tap.embedding("e", ids, y, size=7)
        return tap.dense("head", y, y @ p["head"])

    params, batch = tree(0, e=(4, 7), head=(4, 3)), (labels(3, 2, 3, classes=7), labels(9, 2, 3))
    return Case(objective_of(model), params, batch, model)


@program("kernel rounded to four bits, straight-through", family=COMPUTED, checked=BRUTE)
def _rounded():
    def weight(p):
        step = jnp.abs(p["w"]).max() / 7
        return p["w"] + lax.stop_gradient(jnp.round(p["w"] / step) * step - p["w"])

    return computed(weight, {"w": (4, 5)}, "w", behind=())


@program("kernel of a low-rank and a diagonal part", family=COMPUTED, checked=BRUTE)
def _diagonal_and_low_rank():
    def model(p, x, tap):
        w = jnp.diag(p["d"]) + p["u"] @ p["u"].T  # d is still seen in it, so no kernel of its own
        y = jnp.tanh(x @ w)
        return tap.dense("head", y, y @ p["head"])

    params, batch = tree(0, d=(4,), u=(4, 2), head=(4, 3)), (normal(8, 6, 4), labels(9, 6))
    objective = objective_of(model)
    return Case(objective, params, batch, model, squares(objective, params, batch, ["d", "u"]))


@program("Kronecker product of two parameters as a kernel", family=COMPUTED, checked=BRUTE)
def _kronecker():
    shapes = {"u": (2, 5), "v": (2, 1)}
    return computed(lambda p: jnp.kron(p["u"], p["v"]), shapes, "u@effective")


@program("circulant kernel of one vector", family=COMPUTED, checked=BRUTE)
def _circulant():
    index = (jnp.arange(5) - jnp.arange(4)[:, None]) % 5
    return computed(lambda p: p["c"][index], {"c": (5,)}, "c@effective")


@program("cumulative sums of softplus (a monotone kernel)", family=COMPUTED, checked=BRUTE)
def _monotone():
    return computed(lambda p: jnp.cumsum(jax.nn.softplus(p["w"]), 0), {"w": (4, 5)}, "w@effective")


@program("Linen: WeightNorm around Dense", family=COMPUTED, checked="gradient")
def _linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = jnp.tanh(nn.WeightNorm(nn.Dense(5, param_dtype=jnp.float64))(x))
            return nn.Dense(3, param_dtype=jnp.float64)(x)

    batch = (normal(8, 6, 4), labels(9, 6))
    params = Net().init(jax.random.key(0), batch[0])
    return Case(jk.Objective(Net().apply, jk.Categorical()), params, batch)


@program("Linen: SpectralNorm, its vectors as state", family=COMPUTED, checked="gradient")
def _linen_spectral():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(5, param_dtype=jnp.float64)
            x = jnp.tanh(nn.SpectralNorm(dense, param_dtype=jnp.float64)(x, update_stats=True))
            return nn.Dense(3, param_dtype=jnp.float64)(x)

    batch = (normal(8, 6, 4), labels(9, 6))
    state = Net().init(jax.random.key(0), batch[0])
    params = state.pop("params")

    def apply_fn(params, x, state):
        return Net().apply({"params": params, **state}, x, mutable=list(state))

    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, batch, call={"state": state})


@program("NNX: SpectralNorm, its vectors as state", family=COMPUTED, checked="gradient")
def _nnx_spectral():
    class Net(nnx.Module):
        def __init__(self, rngs):
            linear = nnx.Linear(4, 5, param_dtype=jnp.float64, rngs=rngs)
            self.up = nnx.SpectralNorm(linear, param_dtype=jnp.float64, rngs=rngs)
            self.down = nnx.Linear(5, 3, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)), mutable=(nnx.BatchStat, nnx.Param))
    objective = jk.Objective(apply_fn, jk.Categorical())
    return Case(objective, params, (normal(8, 6, 4), labels(9, 6)), call={"state": apply_fn.state})


@program("NNX: WeightNorm around Linear", family=COMPUTED, checked="gradient")
def _nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            linear = nnx.Linear(4, 5, param_dtype=jnp.float64, rngs=rngs)
            self.up = nnx.WeightNorm(linear, rngs=rngs)
            self.down = nnx.Linear(5, 3, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    apply_fn, params = jk.from_nnx(Net(nnx.Rngs(0)), mutable=nnx.Param)
    return Case(jk.Objective(apply_fn, jk.Categorical()), params, (normal(8, 6, 4), labels(9, 6)))
