"""Random stacks of layers, loops and walls: gradient and factors equal the brute force."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jaxkfac as jk
from tests._checks import assert_factors_close, assert_tree_close, objective_of
from tests._likelihoods import mean_loss
from tests._oracle import oracle
from tests._programs import labels, normal, rms
from tests._taps import PLAIN

WIDTH, CLASSES = 4, 3
_PARTS = ("fused", "rows", "list", "again")  # kinds whose two kernels are put side by side
_STACKED = ("scan", "experts", "picked", "ragged")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step of a random program.

    ``walls`` are put around it, innermost first, in the program that the library sees; the
    oracle gets the same step without walls and with loops written out.
    """

    kind: str
    bias: bool
    walls: tuple[str, ...]
    length: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, heads = WIDTH, 2
        if self.kind in _PARTS:
            shape = {"fused": (d, d // 2), "rows": (d // 2, d)}.get(self.kind, (d, d))
            biases = {f"bias{i}": (shape[1],) for i in range(2)} if self.kind != "rows" else {}
            return {f"kernel{i}": shape for i in range(2)} | (biases if self.bias else {})
        stack = (self.length,) if self.kind in _STACKED else ()
        kernel = {
            "heads": (d, heads, d // heads),
            "merge": (heads, d // heads, d),
            "left": (d, d),
        }.get(self.kind, (*stack, d, d))
        bias = {"heads": (heads, d // heads)}.get(self.kind, (*stack, d))
        if self.kind == "norm":
            return {"scale": (d,)} | ({"bias": (d,)} if self.bias else {})
        if self.kind in ("shift", "gain", "soft"):
            return {{"shift": "bias", "gain": "log", "soft": "rho"}[self.kind]: (d,)}
        has_bias = self.bias and self.kind not in ("picked", "ragged", "unit")
        return {"kernel": kernel} | ({"bias": bias} if has_bias else {})

    def emit(self, name: str, p: dict, x: jax.Array, tap) -> jax.Array:
        """The step with taps and without loops."""
        if self.kind in _PARTS:
            return x + jnp.tanh(self._parts(name, p, x, tap))
        kernel, bias = p.get("kernel"), p.get("bias")
        label = f"{name}/kernel"
        add = (lambda y: y + bias) if bias is not None else (lambda y: y)
        if self.kind in ("dense", "branch", "switch", "custom", "custom vjp", "padded"):
            y = tap.dense(label, x, add(x @ kernel), bias=self.bias)
        elif self.kind == "masked":  # by a constant triangle
            y = add(x @ (kernel * jnp.tril(jnp.ones_like(kernel))))
            y = tap.dense(label, x, y, bias=self.bias)
        elif self.kind == "left":  # the parameter is the left operand, outputs first
            y = tap.dense(label, x, add(jnp.einsum("oi,nsi->nso", kernel, x)), bias=self.bias)
        elif self.kind == "heads":
            y = add(jnp.einsum("nsd,dhk->nshk", x, kernel)).reshape(x.shape)
            y = tap.dense(label, x, y, bias=self.bias)
        elif self.kind == "merge":
            h = x.reshape(*x.shape[:2], 2, -1)
            y = add(jnp.einsum("nshk,hkd->nsd", h, kernel))
            y = tap.dense(label, h, y, in_axes=2, bias=self.bias)
        elif self.kind == "twice":
            y = jnp.tanh(tap.dense(label, x, add(x @ kernel), bias=self.bias))
            y = tap.dense(label, y, add(y @ kernel), bias=self.bias)
        elif self.kind == "repeat":  # one parameter, constant in a loop
            y = x
            for _ in range(self.length):
                y = jnp.tanh(tap.dense(label, y, add(y @ kernel), bias=self.bias))
        elif self.kind == "scan":
            y = x
            for i in range(self.length):
                z = y @ kernel[i] + (0.0 if bias is None else bias[i])
                y = y + jnp.tanh(tap.dense(label, y, z, at=(i,), bias=self.bias))
        elif self.kind == "experts":
            y = sum(
                jnp.cos(i + 1.0)
                * tap.dense(
                    label,
                    jnp.sin((i + 1) * x),
                    jnp.sin((i + 1) * x) @ kernel[i] + (0.0 if bias is None else bias[i]),
                    at=(i,),
                    bias=self.bias,
                )
                for i in range(self.length)
            )
        elif self.kind in ("picked", "ragged"):  # every row goes to the second kernel
            y = tap.dense(label, x, x @ kernel[1], at=(1,))
            for i in {*range(self.length)} - {1}:
                y = y + 0 * tap.dense(label, 0 * x, (0 * x) @ kernel[i], at=(i,))
        elif self.kind == "unit":
            unit = kernel / jnp.linalg.norm(kernel, axis=0)
            y = tap.dense(f"{label}@effective", x, x @ unit)
        elif self.kind == "soft":
            rho, s = p["rho"], jnp.sin(x)
            y = tap.scale(f"{name}/rho", s * jax.nn.sigmoid(rho), 0 * s, shape=(WIDTH,))
            y = y + s * jax.nn.softplus(rho)
        elif self.kind == "norm":
            y = tap.scale(f"{name}/scale", rms(x), rms(x) * p["scale"], shape=(WIDTH,))
            if bias is not None:
                y = tap.lone_bias(f"{name}/bias", y + bias, shape=(WIDTH,))
        elif self.kind == "gain":
            y = jnp.sin(x) * jnp.exp(p["log"])  # exp is its own derivative
            y = tap.scale(f"{name}/log", y, y, shape=(WIDTH,))
        else:
            y = tap.lone_bias(f"{name}/bias", jnp.sin(x) + bias, shape=(WIDTH,))
        return x + jnp.tanh(y)

    def _parts(self, name: str, p: dict, x: jax.Array, tap) -> jax.Array:
        """Each parameter by itself."""
        half, loop = WIDTH // 2, self.kind in ("list", "again")
        inputs = (x[..., :half], x[..., half:]) if self.kind == "rows" else (x, x)
        outs = []
        for i, rows in [*enumerate(inputs), *([(0, x)] if self.kind == "again" else [])]:
            rows = outs[-1] if loop and outs else rows
            y = rows @ p[f"kernel{i}"] + p.get(f"bias{i}", 0.0)
            y = tap.dense(f"{name}/kernel{i}", rows, y, bias=f"bias{i}" in p)
            outs.append(jnp.sin(y) if loop else y)
        if loop:
            return outs[-1]
        return sum(outs) if self.kind == "rows" else jnp.concatenate(outs, -1)

    def run(self, p: dict, x: jax.Array) -> jax.Array:
        """The same step as a user would write it, inside its walls."""
        step = self._looped if self.kind in ("repeat", "scan", "experts") else self._plain
        step = self._joined if self.kind in _PARTS else step
        own = {name: getattr(self, f"_{name.replace(' ', '_')}") for name in _OTHERWISE}
        step = own.get(self.kind, step)
        for wall in self.walls:
            if wall == "vmap" and self.kind == "ragged":  # whose sizes are of all rows
                continue
            step = {"jit": jax.jit, "remat": jax.checkpoint, "vmap": _over_examples}[wall](step)
        return step(p, x)

    def _plain(self, p, x):
        return self.emit("", p, x, PLAIN)

    def _branch(self, p, x):
        """The layer inside of the branch that is taken; under `vmap` each example takes it."""
        looked_at = x if len(x) == 1 else p["kernel"]
        return lax.cond(jnp.max(looked_at) < 1e9, self._plain, lambda p, x: x, p, x)

    def _switch(self, p, x):
        """The second of three branches."""
        looked_at = x if len(x) == 1 else p["kernel"]
        others = lambda p, x: x
        index = jnp.where(jnp.max(looked_at) < 1e9, 1, 0)
        return lax.switch(index, (others, self._plain, others), p, x)

    def _custom(self, p, x):
        return x + jnp.tanh(_affine(p["kernel"], p.get("bias", jnp.zeros(WIDTH)), x))

    def _custom_vjp(self, p, x):
        return x + jnp.tanh(_affine_vjp(p["kernel"], p.get("bias", jnp.zeros(WIDTH)), x))

    def _padded(self, p, x):
        """Columns of zeros, of which nothing is read."""
        y = x @ jnp.pad(p["kernel"], ((0, 0), (1, 2)))
        y = y + jnp.pad(p["bias"], (1, 2)) if self.bias else y
        return x + jnp.tanh(y[..., 1:-2])

    def _picked(self, p, x):
        """An index for each row, which is data."""
        kernels = p["kernel"][(x[..., 0] < 1e9).astype(jnp.int32)]
        return x + jnp.tanh(jnp.einsum("nsd,nsde->nse", x, kernels))

    def _ragged(self, p, x):
        sizes = jnp.zeros(self.length, jnp.int32).at[1].set(x.shape[0] * x.shape[1])
        y = lax.ragged_dot(x.reshape(-1, WIDTH), p["kernel"], sizes)
        return x + jnp.tanh(y.reshape(x.shape))

    def _joined(self, p, x):
        """The parameters side by side in one array."""
        kernels = [p[f"kernel{i}"] for i in range(2)]
        biases = [p[f"bias{i}"] for i in range(2)] if "bias0" in p else None
        if self.kind in ("list", "again"):
            layers = list(zip(kernels, biases or [0.0] * 2, strict=True))
            layers += layers[:1] if self.kind == "again" else []
            stacks = jax.tree.map(lambda *w: jnp.stack(w), *layers)
            step = jax.checkpoint(lambda y, w: (jnp.sin(y @ w[0] + w[1]), None))
            return x + jnp.tanh(lax.scan(step, x, stacks)[0])
        y = x @ jnp.concatenate(kernels, 0 if self.kind == "rows" else 1)
        return x + jnp.tanh(y if biases is None else y + jnp.concatenate(biases))

    def _looped(self, p, x):
        def layer(y, w):
            z = y @ w["kernel"]
            return z + w["bias"] if self.bias else z

        if self.kind == "repeat":
            y, _ = lax.scan(lambda y, _: (jnp.tanh(layer(y, p)), None), x, None, length=self.length)
        elif self.kind == "scan":
            step = jax.checkpoint(lambda y, w: (y + jnp.tanh(layer(y, w)), None))
            y, _ = lax.scan(step, x, p)
        else:
            index = jnp.arange(1, self.length + 1).astype(x.dtype)
            inputs = jnp.sin(index[:, None, None, None] * x)
            y = jnp.einsum("ensi,eio->enso", inputs, p["kernel"])
            if self.bias:
                y = y + p["bias"][:, None, None]
            y = jnp.tensordot(jnp.cos(index), y, 1)
        return x + jnp.tanh(y)


# As the program writes it, not as the tap.
_OTHERWISE = ("branch", "switch", "custom", "custom vjp", "padded", "picked", "ragged")


@jax.custom_jvp
def _affine(w, b, x):
    return x @ w + b


@_affine.defjvp
def _(primals, tangents):
    (w, b, x), (dw, db, dx) = primals, tangents
    return _affine(w, b, x), (x @ dw + db) + dx @ w


@jax.custom_vjp
def _affine_vjp(w, b, x):
    return x @ w + b


def _affine_backward(kept, dy):
    w, x = kept
    rows, of_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return rows.T @ of_rows, of_rows.sum(0), dy @ w.T


_affine_vjp.defvjp(lambda w, b, x: (x @ w + b, (w, x)), _affine_backward)


def _over_examples(step):
    """`vmap` over examples, each a batch of one inside."""
    return lambda p, x: jax.vmap(lambda x: step(p, x[None])[0])(x)


_KINDS = [
    *("dense", "left", "heads", "merge", "twice", "repeat", "scan", "experts", "norm", "shift"),
    *("gain", "soft", "unit", "picked", "ragged", "branch", "switch", "custom", *_PARTS),
    *("custom vjp", "padded", "masked"),
]
pieces = st.builds(
    Piece,
    kind=st.sampled_from(_KINDS),
    bias=st.booleans(),
    walls=st.lists(st.sampled_from(["jit", "remat", "vmap"]), max_size=2).map(tuple),
    length=st.integers(2, 3),
)


def _program(stack: list[Piece]):
    def model(p, x, tap):
        for i, piece in enumerate(stack):
            x = piece.run(p[f"p{i}"], x)
        return x @ p["head"]

    def plain(p, x, tap):
        for i, piece in enumerate(stack):
            x = piece.emit(f"p{i}", p[f"p{i}"], x, tap)
        return tap.dense("head", x, x @ p["head"])

    return model, plain


def _marked(model):
    """The same loss, which names its outputs by a mark."""

    def loss(params, batch):
        x, targets, *mask = batch
        mask = mask[0] if mask else jnp.ones(targets.shape, bool)
        logits = jk.mark_outputs(model(params, x, PLAIN), jk.Categorical(), mask=mask)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return -jnp.where(mask, log_p, 0.0).sum() / mask.sum(dtype=float)

    return loss


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    stack=st.lists(pieces, min_size=1, max_size=4),
    masked=st.booleans(),
    padded=st.booleans(),
    joint=st.booleans(),
    marked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_program_has_the_factors_of_the_brute_force(
    x64, stack, masked, padded, joint, marked, seed
):
    check(stack, masked, padded, joint, marked, seed)


@pytest.mark.default(1, slow=0)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, len(_KINDS), 3))
def test_every_piece_of_a_random_program_is_in_one(x64, first):
    """What is drawn above need not have each of them."""
    walls = ("jit",), ("remat",), ("vmap", "remat")
    stack = [
        Piece(kind, bias=bool(i % 2), walls=walls[(first // 3 + i) % 3], length=2 + i % 2)
        for i, kind in enumerate(_KINDS[first : first + 3])
    ]
    check(stack, masked=True, padded=bool(first % 2), joint=True, marked=False, seed=first)


def check(
    stack: list[Piece], masked: bool, padded: bool, joint: bool, marked: bool, seed: int
) -> None:
    """Value, gradient and factors of a program of these pieces."""
    n, s = 2, 3
    params = {
        f"p{i}": {
            name: normal(1000 * seed + 10 * i + j, *shape)
            for j, (name, shape) in enumerate(piece.shapes().items())
        }
        for i, piece in enumerate(stack)
    }
    params["head"] = normal(1000 * seed + 999, WIDTH, CLASSES)
    rng = np.random.default_rng(seed)
    batch = (normal(seed, n, s, WIDTH, scale=1.0), labels(seed, n, s, classes=CLASSES))
    if masked:
        mask = rng.random((n, s)) < 0.6
        mask[0, 0] = True
        batch = (*batch, jnp.asarray(mask))
    positions = jnp.asarray(np.arange(s) < rng.integers(1, s + 1, size=(n, 1))) if padded else None
    model, plain = _program(stack)
    bias = "joint" if joint else "separate"
    objective = _marked(model) if marked else objective_of(model)
    # The oracle squares the gradients of positions.
    stats = jk.value_grad_and_factors(objective, bias=bias, scales="diagonal")
    extra = {"positions": positions} if padded else {}
    value, grads, factors = jax.jit(stats)(params, batch, **extra)

    direct = jax.value_and_grad(lambda p, b: mean_loss(plain, "categorical", p, b))
    expected = jax.jit(direct)(params, batch)
    assert_tree_close((value, grads), expected, 1e-10)
    expected = oracle(plain, params, batch, bias=bias, positions=positions)
    found = {layer.name: factors[layer.name] for layer in factors.layers if layer.is_covered}
    assert_factors_close(found, expected, 1e-10)
