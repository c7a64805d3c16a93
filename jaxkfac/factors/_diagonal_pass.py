"""The second pass: a per-example diagonal for parameters that no rule covers."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxkfac.factors._objective import Batch, Objective
from jaxkfac.interception._layer import Layer, ParameterMatrix
from jaxkfac.interception._paths import leaves_by_path, with_leaves
from jaxkfac.interception._table import LayerTable

CHUNK = 8  # examples whose gradients are alive at once


def diagonal_layers(table: LayerTable, params: PyTree) -> list[Layer]:
    """A diagonal block for each uncovered parameter."""
    leaves, layers = leaves_by_path(params), []
    for path in dict.fromkeys(path for path, _ in table.uncovered):
        shape = tuple(leaves[path].shape)
        name = f"{path}@diagonal" if path in table else path
        matrix = ParameterMatrix(path, (), shape, (), (), tuple(range(len(shape))))
        layers.append(
            Layer(name, "diagonal", matrix, None, 1, matrix.size, (), 1, name, False, False)
        )
    return layers


def per_example_diagonals(
    objective: Objective, params: PyTree, batch: Batch, key: Any, layers: list[Layer]
) -> dict[str, Array]:
    """Sum over examples of the squared gradient of each example's sum of terms.

    Memory:
        ``CHUNK`` gradients of the uncovered parameters and their activations.
    """
    leaves = leaves_by_path(params)
    wanted = {layer.weight.path: leaves[layer.weight.path] for layer in layers}

    def summed(wanted: dict[str, Array], example: Batch) -> Array:
        one = jax.tree.map(lambda x: x[None], example)
        outputs, _ = objective.outputs(with_leaves(params, wanted), one.inputs, key)
        mean, count = objective.loss(outputs, one.targets, one.mask)
        return mean * count

    def squares(example: Batch) -> dict[str, Array]:
        return jax.tree.map(jnp.square, jax.grad(summed)(wanted, example))

    number = batch.targets.shape[0]
    rows = jax.lax.map(squares, batch, batch_size=min(CHUNK, number))
    return {layer.name: rows[layer.weight.path].sum(0) for layer in layers}
