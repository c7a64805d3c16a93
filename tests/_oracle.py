"""K-FAC by brute force: one example at a time, every layer output perturbed explicitly.

This file knows nothing of the library. A model is written as ``model(params, inputs, tap)``
and hands each layer's input rows and output to the tap: ``y = tap.dense("w", x, x @ w)``.
With the tap called ``PLAIN`` it is an ordinary JAX function, which the library gets. The
oracle runs the same text with ``y + eps`` for a zero ``eps`` per use, and differentiates
one example's summed negative log-likelihood with respect to every ``eps``.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


# --------------------------------------------------------------- likelihoods


def negative_log_likelihood(likelihood: str, outputs, targets):
    """One number per loss term: the last axis is summed, the others are terms."""
    if likelihood == "categorical":
        picked = jnp.take_along_axis(outputs, targets[..., None], axis=-1)[..., 0]
        return jnp.log(jnp.sum(jnp.exp(outputs), axis=-1)) - picked
    if likelihood == "bernoulli":
        return jnp.sum(jnp.log(1 + jnp.exp(outputs)) - targets * outputs, axis=-1)
    if likelihood == "gaussian":
        return 0.5 * jnp.sum((outputs - targets) ** 2, axis=-1)
    raise ValueError(likelihood)


def fisher_columns(likelihood: str, outputs: np.ndarray) -> np.ndarray:
    """Columns v_c with Σ_c v_c v_cᵀ the Fisher matrix of one term's outputs, as rows."""
    size = outputs.shape[-1]
    if likelihood == "categorical":
        p = np.exp(outputs) / np.exp(outputs).sum()
        return np.sqrt(p)[:, None] * (np.eye(size) - p)
    if likelihood == "bernoulli":
        s = 1 / (1 + np.exp(-outputs))
        return np.diag(np.sqrt(s * (1 - s)))
    return np.eye(size)


def mean_loss(model: Model, likelihood: str, params, batch):
    """Mean negative log-likelihood over the loss terms that the mask keeps."""
    inputs, targets, *mask = batch
    terms = negative_log_likelihood(likelihood, model(params, inputs, PLAIN), targets)
    if not mask:
        return jnp.mean(terms)
    return jnp.sum(terms * mask[0].astype(terms.dtype)) / jnp.sum(mask[0]).astype(terms.dtype)


# ---------------------------------------------------------------- statistics


class Block(NamedTuple):
    """Means of one layer; fields that do not apply are None."""

    kind: str
    a: np.ndarray | None
    g: np.ndarray | None
    diagonal: np.ndarray | None


class _Sums:
    """Running sums of one layer, or of one slice of a stacked one."""

    def __init__(self, kind: str):
        self.kind, self.a, self.rows, self.g, self.diagonal = kind, 0.0, 0, 0.0, 0.0

    def add_inputs(self, use: Use, x: np.ndarray, keep: np.ndarray, joint: bool) -> None:
        if use.kind == "dense":
            rows = x.reshape(-1, *use.shape)[keep]
            if joint and use.bias:
                rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
            self.a = self.a + rows.T @ rows
        elif use.kind == "embedding":
            self.a = self.a + np.bincount(x.reshape(-1)[keep], minlength=use.shape[0])
        self.rows += int(keep.sum())

    def add_gradients(self, use: Use, x: np.ndarray, g: np.ndarray, keep: np.ndarray) -> None:
        if use.kind in ("dense", "embedding"):
            rows = g.reshape(keep.size, -1)[keep]
            self.g = self.g + rows.T @ rows
        else:
            rows = (g * x if use.kind == "scale" else g).reshape(keep.size, *use.shape)[keep]
            self.diagonal = self.diagonal + (rows**2).sum(axis=0)


def _examples(tree: Any) -> Iterator[Any]:
    count = len(jax.tree.leaves(tree)[0])
    for n in range(count):
        yield jax.tree.map(lambda x, n=n: x[n : n + 1], tree)


def oracle(
    model: Model,
    params: Any,
    batch: tuple,
    *,
    likelihood: str = "categorical",
    fisher: str = "empirical",
    bias: str = "joint",
    positions: Any = None,
) -> dict[str, Block]:
    """A, G and diagonals by the conventions of the library's documentation, as means.

    ``fisher`` is "empirical" or "exact"; the exact one pulls back every column of every
    term's Fisher matrix on its own, so it stays right when outputs mix tokens.
    """
    inputs, targets, *rest = batch
    example = next(_examples((inputs, targets)))
    shapes_tap = Tap()
    outputs_like = jax.eval_shape(lambda p, x: model(p, x, shapes_tap), params, example[0])
    uses = list(shapes_tap.uses)
    zeros = [jnp.zeros(y.shape, y.dtype) for y in shapes_tap.outputs]
    term_shape = outputs_like.shape[1:-1]
    mask = np.asarray(rest[0]) if rest else np.ones((len(jax.tree.leaves(targets)[0]), *term_shape))

    @jax.jit
    def forward(params, x):
        tap = Tap(zeros)
        return model(params, x, tap), tap.inputs

    @jax.jit
    def pull(params, x, cotangent):
        return jax.vjp(lambda eps: model(params, x, Tap(eps)), zeros)[1](cotangent)[0]

    @jax.jit
    def empirical(params, x, y, m):
        def loss(eps):
            terms = negative_log_likelihood(likelihood, model(params, x, Tap(eps)), y)
            return jnp.sum(terms * m.astype(terms.dtype))

        return jax.grad(loss)(zeros)

    sums: dict[tuple[str, tuple[int, ...]], _Sums] = {}
    for n, (x, y) in enumerate(_examples((inputs, targets))):
        outputs, recorded = forward(params, x)
        recorded = [np.asarray(r) for r in recorded]
        if fisher == "empirical":
            pulls = [empirical(params, x, y, mask[n : n + 1])]
        else:
            pulls = []
            for r in np.ndindex(*term_shape):
                if not mask[(n, *r)]:
                    continue
                for column in fisher_columns(likelihood, np.asarray(outputs)[(0, *r)]):
                    cotangent = np.zeros(outputs.shape)
                    cotangent[(0, *r)] = column
                    pulls.append(pull(params, x, jnp.asarray(cotangent, outputs.dtype)))
        for i, use in enumerate(uses):
            total = sums.setdefault((use.name, use.at), _Sums(use.kind))
            row_shape = zeros[i].shape[: use.row_axes]
            keep = np.ones(row_shape, bool)
            if positions is not None and use.positioned and len(row_shape) > 1:
                here = np.asarray(positions[n], bool)
                keep = np.broadcast_to(here.reshape(1, -1, *[1] * (len(row_shape) - 2)), row_shape)
            keep = keep.reshape(-1)
            total.add_inputs(use, recorded[i], keep, bias == "joint")
            for g in pulls:
                total.add_gradients(use, recorded[i], np.asarray(g[i]), keep)
    return _means(sums, float(mask.sum()))


def _means(sums: dict, terms: float) -> dict[str, Block]:
    names = list(dict.fromkeys(name for name, _ in sums))
    blocks = {}
    for name in names:
        parts = {at: s for (n, at), s in sums.items() if n == name}
        stack = tuple(max(at[k] for at in parts) + 1 for k in range(len(next(iter(parts)))))

        def stacked(read, parts=parts, stack=stack):
            slices = [np.asarray(read(parts[at])) for at in np.ndindex(*stack)]
            return np.stack(slices).reshape(*stack, *slices[0].shape)

        kind = next(iter(parts.values())).kind
        if kind in ("dense", "embedding"):
            a = stacked(lambda s: s.a / s.rows)
            blocks[name] = Block(kind, a, stacked(lambda s: s.g / terms), None)
        else:
            blocks[name] = Block(kind, None, None, stacked(lambda s: s.diagonal / terms))
    return blocks


def patches(x: np.ndarray | jax.Array, window, strides=None, padding=None) -> jax.Array:
    """Every window of ``x`` (n, *space, channels), by slicing: (n, *out, *window, channels)."""
    space = x.shape[1:-1]
    strides = strides or (1,) * len(space)
    padding = padding or ((0, 0),) * len(space)
    x = jnp.pad(jnp.asarray(x), ((0, 0), *padding, (0, 0)))
    out = [(x.shape[k + 1] - window[k]) // strides[k] + 1 for k in range(len(space))]
    rows = []
    for at in np.ndindex(*out):
        index = tuple(slice(i * s, i * s + w) for i, s, w in zip(at, strides, window, strict=True))
        rows.append(x[(slice(None), *index)])
    return jnp.stack(rows, axis=1).reshape(x.shape[0], *out, *window, x.shape[-1])
