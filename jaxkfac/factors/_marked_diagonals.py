"""Diagonals of whole examples' gradients for a loss that marks its outputs.

Its batch is whatever the loss takes, so no example can be run by itself. Where no term depends on
rows of several examples, the gradient of one example's terms is that of the cotangents of its own
rows, the others zero: one backward pass for each example.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jaxkfac._errors import UncoveredParameterError
from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._program import Linearised
from jaxkfac.interception import Layer, Traced, fast_convolutions, varying_axes
from jaxkfac.linalg import statistics_dtype


def marked_diagonals(
    loss: Callable[..., Any],
    traced: Traced,
    at: Linearised,
    layers: Sequence[Layer],
    estimator: Estimator,
) -> dict[str, Array]:
    """Sum over examples of the squared gradient of each example's sum of terms.

    Args:
        loss: The loss.
        traced: The program.
        at: The same at one point.
        layers: The layers.
        estimator: The Fisher type, with its key or labels.

    Raises:
        UncoveredParameterError: inside ``shard_map``, where devices have examples of their own.

    Memory:
        One backward pass, and the squares.
    """
    if any(map(varying_axes, jax.tree.leaves(at.outputs))):
        names = ", ".join(repr(layer.name) for layer in layers)
        raise UncoveredParameterError(
            f"{names}: is behind a weight that is computed from it, and its diagonal is one of "
            "single examples' gradients, which inside jax.shard_map are sums over devices: leave "
            "it out with layers=, or split the batch under jax.jit"
        )
    assert at.gradient is not None
    gradient = at.gradient

    def squares(cotangents: PyTree) -> dict[str, Array]:
        totals = []
        for marks, number in _marks_by_examples(traced):
            one = fast_convolutions(lambda n, marks=marks: of_example(n, marks, cotangents))
            totals.append(jax.lax.map(one, jnp.arange(number)))
        return jax.tree.map(lambda *parts: sum(part.sum(0) for part in parts), *totals)

    def of_example(n: Int[Array, ""], marks: set[int], cotangents: PyTree) -> dict[str, Array]:
        rows = [
            _row_alone(x, n) if k in marks else jnp.zeros_like(x) for k, x in enumerate(cotangents)
        ]
        found = gradient(rows)
        return {
            layer.name: jnp.square(x.astype(statistics_dtype(x.dtype)))
            for layer in layers
            for x in [found[layer.weight.path]]
        }

    direct = at._replace(vjp=lambda cotangents: cotangents, own=at.cotangents)
    sums = estimator.gathered(loss, direct, at.batch, squares)
    return {name: x * at.squares_to_sums.astype(x.dtype) for name, x in sums.items()}


def _row_alone(x: Array, n: Int[Array, ""]) -> Array:
    if not x.ndim:  # the one row there is
        return x
    there = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == n
    return jnp.where(there, x, jnp.zeros((), x.dtype))


def _marks_by_examples(traced: Traced) -> list[tuple[set[int], int]]:
    """The marks whose outputs have the same examples, and the number of these."""
    table = traced.analysis.table
    axes = [traced.output_axes(k) for k in range(len(traced.marks))]
    leading = [table.atoms(own[0]) if own else () for own in axes]
    return [
        ({k for k, own in enumerate(leading) if own == atoms}, number)
        for atoms, number in traced.example_axes
    ]
