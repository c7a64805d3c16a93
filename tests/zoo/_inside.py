"""Taps inside the layers of other libraries, so that brute force runs their own models.

``tapped(apply_fn, *layers)`` is ``apply_fn`` as a model with taps: while it runs, the layers that
the library has are called through a few lines of ours, which say what their input rows are. A layer
knows its name from its parameter's array, which is the one in ``params`` wherever it has got to.
Nothing of jaxkfac is used here.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from tests._programs import normal
from tests._taps import Model, Tap, patches

INSIDE = "brute force, taps in the library's own layers"


def drawn(params: Any, dtype: Any = jnp.float64) -> Any:
    """Every parameter at random about its first value: zeros and ones would hide a mistake."""
    leaves, tree = jax.tree.flatten(params)
    noise = [normal(50 + i, *leaf.shape, scale=0.3) for i, leaf in enumerate(leaves)]
    return tree.unflatten([jnp.asarray(p + x, dtype) for p, x in zip(leaves, noise, strict=True)])


class Inside:
    """A tap, and the names of the parameters by their arrays."""

    def __init__(self, tap: Tap, params: Any):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.tap = tap
        path = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        self._names = {id(leaf): path(keys) for keys, leaf in leaves}

    def name(self, parameter: Any) -> str:
        """The path of an array, or of a variable of NNX."""
        raw = getattr(parameter, "get_raw_value", None)
        return self._names[id(parameter if raw is None else raw())]

    def known(self, name: str) -> bool:
        return name in self._names.values()

    def einsum(self, spec: str, parameter: Any, x: jax.Array, y: jax.Array, **options: Any):
        """``y`` is the einsum of ``x`` and a kernel: rows are the axes that the kernel lacks."""
        (left, kernel), right = spec.split("->")[0].split(","), spec.split("->")[1]
        inner = "".join(c for c in kernel if c in left)
        outer = "".join(c for c in kernel if c not in left)
        rows = "".join(c for c in left if c not in kernel)
        x, y = jnp.einsum(f"{left}->{rows}{inner}", x), jnp.einsum(f"{right}->{rows}{outer}", y)
        y = self.tap.dense(self.name(parameter), x, y, in_axes=len(inner), **options)
        return jnp.einsum(f"{rows}{outer}->{right}", y)


Layer = Callable[[Inside], AbstractContextManager]


def tapped(apply_fn: Callable[..., Any], *layers: Layer) -> Model:
    """The model, run through its library's own code."""

    def model(params: Any, x: Any, tap: Tap) -> jax.Array:
        with contextlib.ExitStack() as stack:
            inside = Inside(tap, params)
            for layer in layers:
                stack.enter_context(layer(inside))
            return apply_fn(params, x)

    return model


def through(owner: Any, attribute: str, ours: Callable) -> Layer:
    """``owner.attribute(...)`` is ``ours(inside, theirs, ...)``."""

    @contextlib.contextmanager
    def layer(inside: Inside):
        kept, theirs = inspect.getattr_static(owner, attribute), getattr(owner, attribute)

        def call(*args, **options):
            return ours(inside, theirs, *args, **options)

        setattr(owner, attribute, call)
        try:
            yield
        finally:
            setattr(owner, attribute, kept)

    return layer


# ------------------------------------------------------------------ Linen, NNX


def linen_dense(inside: Inside) -> AbstractContextManager:
    def ours(theirs, args, options, context):
        y = theirs(*args, **options)
        if not isinstance(context.module, nn.Dense) or context.method_name != "__call__":
            return y
        name = "/".join(("params", *context.module.path, "kernel"))
        (x,) = args
        return inside.tap.dense(name, x, y, bias=context.module.use_bias)

    return nn.intercept_methods(ours)


def nnx_linear(inside: Inside, theirs: Callable, self: Any, x: jax.Array) -> jax.Array:
    return inside.tap.dense(inside.name(self.kernel), x, theirs(self, x), bias=self.use_bias)


# ------------------------------------------------------------------ Equinox


def equinox_linear(inside: Inside, theirs: Callable, self: Any, x: Any, **options: Any):
    y = theirs(self, x, **options)
    return inside.tap.dense(inside.name(self.weight), x, y, bias=self.bias is not None)


def equinox_group_norm(inside: Inside, theirs: Callable, self: Any, x: Any, **options: Any):
    """Of one group, over channels and space."""
    rows = jnp.moveaxis((x - x.mean()) / jnp.sqrt(x.var() + self.eps), 0, -1)
    y, shape = jnp.moveaxis(theirs(self, x, **options), 0, -1), self.weight.shape
    y = inside.tap.scale(inside.name(self.weight), rows, y, shape=shape)
    y = inside.tap.lone_bias(inside.name(self.bias), y, shape=shape)
    return jnp.moveaxis(y, -1, 0)


def convolution(
    inside: Inside, theirs: Callable, lhs: Any, rhs: Any, window_strides: Any, padding: Any,
    lhs_dilation: Any = None, rhs_dilation: Any = None, feature_group_count: int = 1,
):  # fmt: skip
    """``lax.conv_general_dilated`` of one group, channels first."""
    assert feature_group_count == 1
    options = {"lhs_dilation": lhs_dilation, "rhs_dilation": rhs_dilation}
    y = theirs(lhs, rhs, window_strides, padding, **options)
    padding = None if padding == "VALID" else padding
    rows = patches(
        jnp.moveaxis(lhs, 1, -1), rhs.shape[2:], window_strides, padding, dilation=rhs_dilation,
        input_dilation=lhs_dilation,
    )  # fmt: skip
    axes, name = rhs.ndim - 2, inside.name(rhs)
    bias = name.removesuffix("weight") + "bias"
    rows, y = jnp.moveaxis(rows, -1, 1 + axes), jnp.moveaxis(y, 1, -1)
    y = inside.tap.dense(name, rows, y, bias=inside.known(bias), in_axes=1 + axes)
    return jnp.moveaxis(y, -1, 1)


# ------------------------------------------------------------------ loops, written out


def loop_of_vmap(_: Inside, theirs: Callable, fn: Callable) -> Callable:
    """``vmap`` over the first axis of every array."""

    def mapped(*args):
        leaves, tree = jax.tree.flatten(args)
        each = [tree.unflatten([leaf[i] for leaf in leaves]) for i in range(len(leaves[0]))]
        return jax.tree.map(lambda *rows: jnp.stack(rows), *(fn(*row) for row in each))

    return mapped


def loop_of_scan(_: Inside, theirs: Callable, f: Callable, init: Any, xs: Any):
    out = []
    for i in range(len(jax.tree.leaves(xs)[0])):
        init, y = f(init, jax.tree.map(lambda x, i=i: x[i], xs))
        out.append(y)
    return init, jax.tree.map(lambda *rows: jnp.stack(rows), *out)


SCAN = through(lax, "scan", loop_of_scan)
