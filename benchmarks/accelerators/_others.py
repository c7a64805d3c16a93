"""Programs that are no decoder: gradients, with factors, and a K-FAC update of many layers."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jaxkfac as jk
from benchmarks.factors import DenseNet
from benchmarks.optimizer_steps import UNROLLED, unrolled_update

ROWS, WIDTH, CLASSES = 4096, 512, 128


def others(dtype: Any) -> Mapping[str, Callable[[], Any]]:
    """``{name: () to (function, shapes of its arguments)}``."""
    out: dict[str, Callable[[], Any]] = {}
    for name, program in {
        "dense 8 x 512": _dense,
        "batch statistics (ResNet)": _resnet,
        "marked outputs (CLIP)": _contrastive,
        "transformed parameters": _transformed,
        "layers in a cond": _branches,
    }.items():
        for collect in (False, True):
            step = functools.partial(_step, program, dtype, collect=collect)
            out[f"{name}, {'factors' if collect else 'gradient'}"] = step
    for mode in ("exact", "pi"):
        update = functools.partial(unrolled_update, UNROLLED, dtype, damping_mode=mode)
        out[f"K-FAC update of {UNROLLED} layers, {mode}"] = update
    return out


def _step(program: Callable[[Any], Any], dtype: Any, *, collect: bool) -> Any:
    """A program's gradient, or gradient and factors; its state goes in and comes out."""
    objective, params, batch, call = program(functools.partial(jax.ShapeDtypeStruct, dtype=dtype))
    if collect:
        fn = jk.value_grad_and_factors(objective)
    else:
        fn = jax.value_and_grad(objective, has_aux=bool(call))
    return lambda params, batch, call: fn(params, batch, **call), (params, batch, call)


def _ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _dense(of: Any) -> Any:
    """As `benchmarks.factors` times it."""
    x, model = of((ROWS, WIDTH)), DenseNet()
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), x)
    params = jax.tree.map(lambda p: of(p.shape), params)
    return jk.Objective(model.apply, jk.Categorical()), params, (x, _ids(ROWS)), {}


class _Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        stride = 1 if inputs == outputs else 2  # one more norm, too: that of the short cut
        self.first = conv(inputs, outputs, (3, 3), strides=stride)
        self.second = conv(outputs, outputs, (3, 3))
        self.short = None if stride == 1 else conv(inputs, outputs, (1, 1), strides=stride)
        norm = functools.partial(nnx.BatchNorm, outputs, dtype=dtype, rngs=rngs)
        self.norms = nnx.List([norm() for _ in range(1 + stride)])

    def __call__(self, x: Array) -> Array:
        y = self.norms[1](self.second(nnx.relu(self.norms[0](self.first(x)))))
        return nnx.relu(y + (x if self.short is None else self.norms[2](self.short(x))))


class _ResNet(nnx.Module):
    def __init__(self, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 64, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, dtype=dtype, rngs=rngs)
        sizes = (64, 64, 128, 256, 512)
        block = functools.partial(_Block, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([block(*pair) for pair in itertools.pairwise(sizes)])
        self.head = nnx.Linear(512, CLASSES, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2))).astype(jnp.float32)


def _resnet(of: Any) -> Any:
    """Four blocks, images of 32 x 32, with batch statistics in training."""
    model = nnx.eval_shape(lambda: _ResNet(dtype=of(()).dtype, rngs=nnx.Rngs(0)))
    apply_fn, params = jk.from_nnx(model, mutable=nnx.BatchStat)
    params = jax.tree.map(lambda p: of(p.shape), params)
    batch = (of((128, 32, 32, 3)), _ids(128))
    return jk.Objective(apply_fn, jk.Categorical()), params, batch, {"state": apply_fn.state}


def _contrastive(of: Any) -> Any:
    """Two towers, and a contrastive loss in both directions that marks its outputs."""

    def tower(p: Any, x: Array) -> Array:
        return jnp.tanh(x @ p["up"]) @ p["down"]

    def loss(p: Any, batch: Any) -> Array:
        images, texts = tower(p["image"], batch[0]), tower(p["text"], batch[1])
        logits = (images @ texts.T).astype(jnp.float32)

        def one_way(logits: Array) -> Array:
            logits = jk.mark_outputs(logits, jk.Categorical(), weight=0.5)
            return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()

        return 0.5 * one_way(logits) + 0.5 * one_way(logits.T)

    layers = {"up": of((WIDTH, 2 * WIDTH)), "down": of((2 * WIDTH, WIDTH))}
    rows = of((1024, WIDTH))
    return loss, {"image": layers, "text": dict(layers)}, (rows, rows), {}


def _transformed(of: Any) -> Any:
    """Kernels that are functions of their parameters."""

    def apply(p: Any, x: Array) -> Array:
        x = jnp.tanh(x @ (p["gated"] * jax.nn.sigmoid(p["gated"]) * jnp.exp(p["gain"])))
        x = jnp.tanh(x @ jax.nn.softplus(p["positive"])) / (1 + p["scale"] ** 2)
        return (x @ p["head"]).astype(jnp.float32)

    square, row = of((WIDTH, WIDTH)), of((WIDTH,))
    params = {"gated": square, "gain": row, "positive": square, "scale": row}
    params["head"] = of((WIDTH, CLASSES))
    return jk.Objective(apply, jk.Categorical()), params, (of((ROWS, WIDTH)), _ids(ROWS)), {}


def _branches(of: Any) -> Any:
    """One of two layers, chosen by the batch."""

    def apply(p: Any, inputs: Any) -> Array:
        x, which = inputs
        x = jax.lax.cond(
            which == 0, lambda x: jnp.tanh(x @ p["left"]), lambda x: jnp.sin(x @ p["right"]), x
        )
        return (x @ p["head"]).astype(jnp.float32)

    square = of((WIDTH, WIDTH))
    params = {"left": square, "right": square, "head": of((WIDTH, CLASSES))}
    batch = ((of((ROWS, WIDTH)), _ids()), _ids(ROWS))
    return jk.Objective(apply, jk.Categorical()), params, batch, {}
