"""K-FAC and EKFAC by brute force, in NumPy.

This file knows nothing of the library. A model is written with taps (see ``_taps``). What
each example gives to each layer comes from ``_example_rows``; here are only the conventions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tests._example_rows import Rows, layer_rows
from tests._taps import Model


class Block(NamedTuple):
    """Means of one layer; fields that do not apply are None."""

    kind: str
    a: np.ndarray | None
    g: np.ndarray | None
    diagonal: np.ndarray | None


def oracle(
    model: Model,
    params: Any,
    batch: tuple,
    *,
    likelihood: str = "categorical",
    fisher: str = "empirical",
    sharing: str = "expand",
    scales: str = "diagonal",
    bias: str = "joint",
    positions: Any = None,
    labels: Any = None,
) -> dict[str, Block]:
    """A, G and diagonals by the conventions of the library's documentation, as means.

    ``labels`` is (samples, *targets) and goes with ``fisher="mc"``.
    """
    forward = fisher == "forward"
    fisher = "empirical" if forward else fisher
    per_example, terms = layer_rows(
        model, params, batch, likelihood, fisher, bias, positions, labels
    )
    slices: dict[str, dict[tuple[int, ...], Block]] = {}
    for name, at in per_example[0]:
        rows = [example[name, at] for example in per_example]
        mean = _forward_block if forward else _block
        slices.setdefault(name, {})[at] = mean(rows, terms, sharing, scales)
    return {name: _stacked(parts) for name, parts in slices.items()}


def _block(rows: list[Rows], terms: float, sharing: str, scales: str) -> Block:
    kind = rows[0].kind
    if kind in ("dense", "embedding"):
        reduce = sharing == "reduce" and kind == "dense"
        g = [r.g.sum(axis=1, keepdims=True) if reduce else r.g for r in rows]
        gg = sum(np.einsum("pri,prj->ij", x, x) for x in g) / terms
        return Block(kind, _input_factor(rows, reduce), gg, None)
    by_position = scales == "diagonal" and sharing == "expand"
    g = [r.g if by_position else r.g.sum(axis=1, keepdims=True) for r in rows]
    if scales == "full_block":
        flat = [x.reshape(*x.shape[:2], -1) for x in g]
        block = sum(np.einsum("pri,prj->ij", x, x) for x in flat) / terms
        return Block(kind, np.ones(1), block, None)
    return Block(kind, None, None, sum((x**2).sum(axis=(0, 1)) for x in g) / terms)


def _forward_block(rows: list[Rows], terms: float, sharing: str, scales: str) -> Block:
    kind, shape = rows[0].kind, rows[0].g.shape[2:]
    if kind in ("dense", "embedding"):
        reduce = sharing == "reduce" and kind == "dense"
        return Block(kind, _input_factor(rows, reduce), np.eye(shape[0]), None)
    if kind == "bias":
        return Block(kind, None, None, np.ones(shape))
    x = [r.x if sharing == "expand" else r.x.mean(axis=0, keepdims=True) for r in rows]
    x = np.concatenate(x)
    return Block(kind, None, None, (x**2).mean(axis=0))


def _input_factor(rows: list[Rows], reduce: bool) -> np.ndarray:
    if rows[0].kind == "embedding":
        ids = np.concatenate([r.x for r in rows])
        return np.bincount(ids, minlength=rows[0].size) / len(ids)
    # an example without a row that exists has no mean, and is no row of A
    x = [r.x.mean(axis=0, keepdims=True) if reduce else r.x for r in rows if len(r.x)]
    x = np.concatenate(x)
    return x.T @ x / len(x)


def _stacked(parts: Mapping[tuple[int, ...], Any]) -> Any:
    """One block of arrays stacked along the slices' indices."""
    depth = len(next(iter(parts)))
    shape = tuple(max(at[k] for at in parts) + 1 for k in range(depth))
    ordered = [parts[at] for at in np.ndindex(*shape)]

    def stack(*arrays):
        return np.stack(arrays).reshape((*shape, *arrays[0].shape))

    if not isinstance(ordered[0], Block):
        return stack(*ordered)
    arrays = [
        None if column[0] is None else stack(*column)
        for column in zip(*[block[1:] for block in ordered], strict=True)
    ]
    return Block(ordered[0].kind, *arrays)


class Corrected(NamedTuple):
    """Mean squared gradients in an eigenbasis."""

    values: np.ndarray  # (stack..., in[+1], out), or the diagonal of a scale or lone bias
    bias: np.ndarray | None = None  # (stack..., out), of a bias with a block of its own


def corrected_eigenvalues(
    model: Model,
    params: Any,
    batch: tuple,
    vectors: Mapping[str, tuple[Any, Any]],
    *,
    likelihood: str = "categorical",
    fisher: str = "empirical",
    per: str = "example",
    scales: str = "diagonal",
    bias: str = "joint",
    positions: Any = None,
    labels: Any = None,
) -> dict[str, Corrected]:
    """EKFAC in the bases ``{layer: (Q_A, Q_G)}``, where None is the identity.

    A full block of a scale or lone bias has one input row, a one, and the parameter's entries
    as outputs; it is always by example.
    """
    per_example, terms = layer_rows(
        model, params, batch, likelihood, fisher, bias, positions, labels
    )
    sums: dict[str, dict[tuple[int, ...], list]] = {}
    for example in per_example:
        for (name, at), rows in example.items():
            q_a, q_g = (None if q is None else np.asarray(q)[at] for q in vectors[name])
            gradients = _row_gradients(rows)
            if scales == "full_block" and rows.kind in ("scale", "bias"):
                gradients = gradients.sum(axis=1).reshape(len(gradients), 1, 1, -1)
            parts = [gradients, rows.g] if rows.kind == "dense" else [gradients]
            here = sums.setdefault(name, {}).setdefault(at, [0.0] * len(parts))
            for i, part in enumerate(parts):
                part = part.sum(axis=1, keepdims=True) if per == "example" else part
                if q_a is not None and i == 0 and rows.kind == "dense":
                    part = np.einsum("ki,prkj->prij", q_a, part)
                if q_g is not None:
                    part = part @ q_g
                here[i] = here[i] + (part**2).sum(axis=(0, 1)) / terms
    return {
        name: Corrected(
            _stacked({at: part[0] for at, part in parts.items()}),
            _stacked({at: part[1] for at, part in parts.items()})
            if bias == "separate" and len(next(iter(parts.values()))) == 2
            else None,
        )
        for name, parts in sums.items()
    }


def _row_gradients(rows: Rows) -> np.ndarray:
    """(pulls, rows, in, out), or (pulls, rows, *shape) for scales and lone biases."""
    if rows.kind == "dense":
        return np.einsum("ri,prj->prij", rows.x, rows.g)
    if rows.kind == "embedding":
        return np.einsum("ri,prj->prij", np.eye(rows.size)[rows.x], rows.g)
    return rows.g
