"""What one example gives to each layer: input rows, and every pull's gradient rows.

For every example the outputs are differentiated with respect to a zero added to each layer's
output (see ``_taps``); what is left is indexing and products, in NumPy.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests._likelihoods import pulls
from tests._taps import Model, Tap


class Rows(NamedTuple):
    """What one example gives to one layer, or to one slice of a stacked one.

    ``x`` is (rows, in) for dense layers, (rows,) of indices for embeddings, and (rows,
    *shape) for scales. ``g`` is (pulls, rows, out), for scales and lone biases (pulls, rows,
    *shape): each row's part of the parameter's gradient. Rows are the positions that exist,
    of every use.
    """

    kind: str
    size: int  # of an embedding's table
    x: np.ndarray
    g: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _linearised(model: Model, params: Any, x: Any):
    """Outputs, every use's input, and the Jacobian (outputs, *shape) for every use's output."""
    shapes = Tap()
    jax.eval_shape(lambda: model(params, x, shapes))
    zeros = [jnp.zeros(y.shape, y.dtype) for y in shapes.outputs]

    def run(eps):
        tap = Tap(eps)
        return model(params, x, tap), tap.inputs

    outputs, pull, inputs = jax.vjp(run, zeros, has_aux=True)
    basis = jnp.eye(outputs.size, dtype=outputs.dtype).reshape(-1, *outputs.shape)
    return outputs, inputs, jax.vmap(pull)(basis)[0]


def examples(tree: Any) -> Iterator[Any]:
    """The examples of a batch, each a batch of one."""
    for n in range(len(jax.tree.leaves(tree)[0])):
        yield jax.tree.map(lambda x, n=n: x[n : n + 1], tree)


def mask_of(batch: tuple, term_shape: tuple[int, ...]) -> np.ndarray:
    """Which loss terms count, (examples, *terms)."""
    inputs, _, *rest = batch
    if rest:
        return np.asarray(rest[0])
    return np.ones((len(jax.tree.leaves(inputs)[0]), *term_shape))


def layer_rows(
    model: Model, params: Any, batch: tuple, likelihood: str, fisher: str, bias: str,
    positions: Any, labels: Any,
) -> tuple[list[dict[tuple[str, tuple[int, ...]], Rows]], float]:  # fmt: skip
    """For each example ``{(layer, slice): Rows}``; and the number of loss terms."""
    inputs, targets, *_ = batch
    probe = Tap()
    first = next(examples(inputs))
    outputs = jax.eval_shape(lambda p, x: model(p, x, probe), params, first)
    mask = mask_of(batch, outputs.shape[1:-1])
    found = []
    for n, x in enumerate(examples(inputs)):
        outputs, recorded, jacobian = _linearised(model, params, x)
        drawn = None if labels is None else np.asarray(labels)[:, n]
        output = np.asarray(outputs[0])
        vs = pulls(likelihood, fisher, output, np.asarray(targets)[n], mask[n], drawn)
        vs = np.asarray(vs).reshape(len(vs), output.size)
        layers: dict = {}
        for use, rows, j in zip(probe.uses, recorded, jacobian, strict=True):
            j, rows = np.asarray(j, np.float64), np.asarray(rows)
            row_shape = j.shape[1 : 1 + use.row_axes]
            g = (vs @ j.reshape(len(j), -1)).reshape(len(vs), *j.shape[1:])
            keep = np.ones(row_shape, bool)
            if positions is not None and use.positioned and len(row_shape) > 1:
                here = np.asarray(positions[n], bool)
                keep = np.broadcast_to(here.reshape(1, -1, *[1] * (len(row_shape) - 2)), row_shape)
            keep = keep.reshape(-1)
            if use.kind in ("dense", "embedding"):
                g = g.reshape(len(vs), keep.size, math.prod(j.shape[1 + use.row_axes :]))
            else:
                rows = np.broadcast_to(rows, j.shape[1:])
                g = g * rows if use.kind == "scale" else g
                # Features that share one element: the gradient of a row is their sum.
                g = g.reshape(len(vs), keep.size, -1, *use.shape).sum(2)
                rows = rows.reshape(keep.size, -1, *use.shape).sum(1)
            if use.kind == "embedding":
                rows = rows.reshape(-1)
            else:
                rows = rows.astype(np.float64).reshape(keep.size, *use.shape)
            if use.kind == "dense" and use.bias and bias == "joint":
                rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
            size = use.shape[0] if use.kind == "embedding" else 0
            layers.setdefault((use.name, use.at), []).append(
                Rows(use.kind, size, rows[keep], g[:, keep])
            )
        found.append({key: _together(parts) for key, parts in layers.items()})
    return found, float(mask.sum())


def _together(parts: list[Rows]) -> Rows:
    return Rows(
        parts[0].kind,
        parts[0].size,
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.g for part in parts], axis=1),
    )
