"""The second pass: a per-example diagonal for parameters that no rule covers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxkfac._errors import CoupledExamplesError, UncoveredParameterError
from jaxkfac.factors._estimator import Estimator
from jaxkfac.factors._loss_terms import total_count
from jaxkfac.factors._objective import Batch, Objective
from jaxkfac.factors._program import Program
from jaxkfac.interception import (
    Layer,
    LayerTable,
    ParameterMatrix,
    Traced,
    cast_varying,
    fast_convolutions,
    leaves_by_path,
    varying_axes,
    whole,
    with_leaves,
)
from jaxkfac.linalg import map_over_chunks, statistics_dtype

CHUNK = 8  # examples whose gradients are alive at once


def diagonal_layers(table: LayerTable, params: PyTree) -> list[Layer]:
    """A diagonal block for each uncovered parameter.

    Raises:
        UncoveredParameterError: one is complex.
    """
    leaves, layers = leaves_by_path(params), []
    behind = {layer.weight.path for layer in table.second_pass}
    for path in dict.fromkeys(path for path, _ in table.uncovered if path not in behind):
        if jnp.issubdtype(leaves[path].dtype, jnp.complexfloating):
            raise UncoveredParameterError(
                f"{path!r} is complex ({leaves[path].dtype}): the square of a complex gradient is "
                "no diagonal of a Fisher; leave it out with uncovered='ignore'"
            )
        shape = tuple(leaves[path].shape)
        name = f"{path}@diagonal" if path in table else path
        matrix = ParameterMatrix(path, (), shape, (), (), tuple(range(len(shape))))
        layers.append(
            Layer(name, "diagonal", matrix, None, 1, matrix.size, (), 1, name, False, False)
        )
    return layers


def apart_remedy(meeting: str) -> str:
    """What the user can say where it is not known whether examples meet."""
    if "not known" not in meeting:
        return ""
    return (
        ", or say examples='apart' if you know that they do not (jk.check_coverage tests it on "
        "your data)"
    )


def check_alone(program: Program, traced: Traced, layers: list[Layer]) -> None:
    """Refuse to run each example by itself where its output depends on other examples, or may.

    Raises:
        CoupledExamplesError: naming the layers, and where examples meet.
    """
    if met := program.meeting(traced, "value", alone=True):
        names = ", ".join(repr(layer.name) for layer in layers)
        raise CoupledExamplesError(
            f"{names}: uncovered='diagonal' runs each example alone, and {met} (batch statistics, "
            "a product along the batch). Leave these parameters out with layers= or "
            "uncovered='ignore', or put the model in evaluation mode (Linen: "
            f"use_running_average=True; NNX: model.eval()){apart_remedy(met)}"
        )


def per_example_diagonals(
    objective: Objective,
    params: PyTree,
    batch: Batch,
    layers: list[Layer],
    estimator: Estimator,
    *,
    key: Key[Array, ""] | None,
    state: PyTree | None = None,
) -> dict[str, Array]:
    """Sum over examples of the squared gradient of each example's sum of terms.

    The estimator runs on each example by itself; ``key`` and ``state`` are the
    model's own. Inside ``shard_map`` each device has examples of its own, and the sum is over all.

    Memory:
        ``CHUNK`` gradients of the uncovered parameters and their activations; one where the model
        has an operation that JAX cannot batch.
    """
    leaves = leaves_by_path(params)
    axes = tuple(sorted(set().union(*map(varying_axes, jax.tree.leaves(batch)))))
    # The gradient of what all devices hold alike would be a sum over them, before it is squared.
    wanted = {
        layer.weight.path: jax.tree.reduce(cast_varying, batch, leaves[layer.weight.path])
        for layer in layers
    }
    number = batch.num_examples

    def squares(example: tuple[Batch, Estimator]) -> dict[str, Array]:
        one, its = example
        one = jax.tree.map(lambda x: x[None], one)

        def outputs_of(wanted: dict[str, Array]) -> PyTree:
            return objective.outputs(with_leaves(params, wanted), one.inputs, key, state)[0]

        outputs, vjp = jax.vjp(outputs_of, wanted)
        terms = total_count(objective.heads(outputs, None, one.mask))

        def contribution(cotangents: PyTree) -> dict[str, Array]:
            cotangents = objective.in_batch(cotangents, one.mask, batch)
            return {
                path: jnp.square(x.astype(statistics_dtype(x.dtype)) * terms)
                for path, x in vjp(cotangents)[0].items()
            }

        return its.expectation(objective, outputs, one, contribution)

    # No loop runs along an axis that is split.
    examples = whole((batch, estimator.by_example(number)))
    some = lambda part, _: jax.vmap(squares)(part)
    try:
        rows = map_over_chunks(some, examples, CHUNK, in_loop=fast_convolutions)
    except NotImplementedError:  # an operation that JAX has no batches of: a grouped product
        rows = jax.lax.map(fast_convolutions(squares), examples)
    sums = {layer.name: rows[layer.weight.path].sum(0) for layer in layers}
    return jax.lax.psum(sums, axes) if axes else sums
