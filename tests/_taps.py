"""Models that say where their layers are, without knowing the library.

A model is written as ``model(params, inputs, tap)`` and hands each layer's input rows and
output to the tap: ``y = tap.dense("w", x, x @ w)``. With the tap called ``PLAIN`` it is an
ordinary JAX function, which the library gets; the oracle runs the same text with a ``Tap``
that adds a zero ``eps`` to every output, and differentiates with respect to those.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Model = Callable[..., jax.Array]


class Use(NamedTuple):
    """What one call of a tap says about a layer, without arrays."""

    kind: str  # "dense", "embedding", "scale" or "bias"
    name: str
    at: tuple[int, ...]  # index into the stack of a stacked parameter
    bias: bool  # a bias is added to this product and to nothing else
    positioned: bool  # the rows are the positions of `positions`
    row_axes: int
    shape: tuple[int, ...]  # features in, or the parameter's shape for scales and biases


class Tap:
    """Adds ``eps[i]`` to the output of the i-th layer use and remembers the inputs."""

    def __init__(self, eps: list[jax.Array] | None = None):
        self.eps, self.uses, self.inputs, self.outputs = eps, [], [], []

    def _emit(self, use: Use, rows: jax.Array, y: jax.Array) -> jax.Array:
        self.uses.append(use)
        self.inputs.append(rows)
        self.outputs.append(y)
        return y if self.eps is None else y + self.eps[len(self.uses) - 1]

    def dense(self, name, x, y, *, at=(), bias=False, in_axes=1, positioned=True):
        """``x`` is (rows..., in...) and ``y`` is (rows..., out...), in the parameter's order."""
        rows = x.ndim - in_axes
        features = (math.prod(x.shape[rows:]),)
        return self._emit(Use("dense", name, at, bias, positioned, rows, features), x, y)

    def embedding(self, name, ids, y, *, size, at=(), positioned=True):
        """``y`` is the table of ``size`` rows read at ``ids``."""
        return self._emit(Use("embedding", name, at, False, positioned, ids.ndim, (size,)), ids, y)

    def scale(self, name, x, y, *, shape, at=(), row_axes=None, positioned=True):
        """``y = x * parameter``; the parameter has ``shape`` and one value per feature."""
        rows = y.ndim - len(shape) if row_axes is None else row_axes
        return self._emit(Use("scale", name, at, False, positioned, rows, shape), x, y)

    def lone_bias(self, name, y, *, shape, at=(), row_axes=None, positioned=True):
        """``y`` is the parameter added to, or set beside, data."""
        rows = y.ndim - len(shape) if row_axes is None else row_axes
        return self._emit(Use("bias", name, at, False, positioned, rows, shape), y, y)


class _Plain(Tap):
    """The tap of the program that the library sees: nothing is added, nothing is kept."""

    def _emit(self, use, rows, y):
        return y


PLAIN = _Plain()


def patches(x, window, strides=None, padding=None, *, dilation=None, input_dilation=None):
    """Every window of ``x`` (n, *space, channels), by slicing: (n, *out, *window, channels).

    ``dilation`` spreads the window's points, ``input_dilation`` puts zeros between those of
    ``x``, before the padding, which crops where it is negative.
    """
    axes = x.ndim - 2
    strides, dilation = strides or (1,) * axes, dilation or (1,) * axes
    padding, input_dilation = padding or ((0, 0),) * axes, input_dilation or (1,) * axes
    x = jnp.asarray(x)
    spread = [(size - 1) * d + 1 for size, d in zip(x.shape[1:-1], input_dilation, strict=True)]
    every = tuple(slice(None, None, d) for d in input_dilation)
    zeros = jnp.zeros((x.shape[0], *spread, x.shape[-1]), x.dtype)
    added = [(max(low, 0), max(high, 0)) for low, high in padding]
    x = jnp.pad(zeros.at[(slice(None), *every)].set(x), ((0, 0), *added, (0, 0)))
    kept = [slice(max(-low, 0), min(high, 0) or None) for low, high in padding]
    x = x[(slice(None), *kept)]
    span = [(w - 1) * d + 1 for w, d in zip(window, dilation, strict=True)]
    out = [(x.shape[k + 1] - span[k]) // strides[k] + 1 for k in range(axes)]
    rows = []
    for at in np.ndindex(*out):
        start = [i * s for i, s in zip(at, strides, strict=True)]
        index = tuple(slice(start[k], start[k] + span[k], dilation[k]) for k in range(axes))
        rows.append(x[(slice(None), *index)])
    return jnp.stack(rows, axis=1).reshape(x.shape[0], *out, *window, x.shape[-1])
