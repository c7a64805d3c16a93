"""Statistics of whole examples: from their sums in the backward pass, or from a second pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac._errors import CoupledExamplesError, UncoveredParameterError
from jaxkfac._jaxpr_compat import cast_varying, replicated, varying_axes
from jaxkfac._mapped_axes import axes_apart, sum_over_devices
from jaxkfac.factors._fisher import Estimator
from jaxkfac.factors._loss_terms import total_count
from jaxkfac.factors._model_call import Batch, ModelCall
from jaxkfac.factors._objective import Objective
from jaxkfac.factors._program import Linearised, Program
from jaxkfac.interception import Layer, LayerTable, ParameterMatrix, Traced, fast_convolutions
from jaxkfac.kinds import InputRows, Products
from jaxkfac.linalg import (
    gram,
    map_over_chunks,
    statistics_dtype,
    sum_over_axis,
    symmetric_gram,
)

# ---------------- outer products of sums over the positions of each example


def input_means(
    inputs: InputRows,
    *,
    ones: bool,
    dense: bool,
    products: Products,
    precision: Any,
) -> tuple[Float[Array, "*sums"], Float[Array, "*stack"]]:
    """Sum of outer products of each example's mean input row, and the number of examples."""
    present = inputs.numbers > 0
    # An example without positions has a mean of zero, not 0 / 0, and is not counted.
    mean = inputs.rows / jnp.where(present, inputs.numbers, 1)[..., None]
    if ones:
        mean = jnp.concatenate([mean, present[..., None].astype(mean.dtype)], -1)
    sums = outer_products(mean, dense=dense, products=products, precision=precision)
    return sums, present.sum(-1, dtype=mean.dtype)


def outer_products(
    rows: Float[Array, "*stack rows n"], *, dense: bool, products: Products, precision: Any
) -> Float[Array, "*sums"]:
    """``(stack..., rows, n)`` to ``(stack..., n, n)``, or to its diagonal."""
    lead = rows.ndim - 2
    if not dense:
        return jnp.square(rows).sum(-2)
    rows, times = products.sampled_examples(rows)
    if lead:
        sums = gram(rows, (lead,), tuple(range(lead)), precision=precision)
    else:
        sums = symmetric_gram(rows, 1, precision=precision)
    return sums if times is None else sums * times.astype(sums.dtype)


def gradient_block(
    layer: Layer,
    gradient: Float[Array, "*parameter examples"],
    products: Products,
    precision: Any,
) -> Float[Array, "*stack n n"]:
    """The dense block of per-example gradients ``(parameter..., examples)``."""
    rows = gradient_rows(layer, gradient)
    return outer_products(rows, dense=True, products=products, precision=precision)


def gradient_rows(
    layer: Layer, gradient: Float[Array, "*parameter examples"]
) -> Float[Array, "*stack examples n"]:
    """Gradients ``(parameter..., examples)`` of a scale or bias as ``(stack..., examples, n)``."""
    weight = dataclasses.replace(layer.weight, index=())
    rows = jax.vmap(weight.read, in_axes=-1, out_axes=-2)(gradient)
    return rows.reshape(*layer.stack, -1, layer.out_features)


# ---------------- the second pass: diagonals of parameters that no rule covers


CHUNK = 8  # examples whose gradients are alive at once


def diagonal_layers(table: LayerTable, params: ArrayTree) -> list[Layer]:
    """Describe a diagonal block for each uncovered parameter.

    Raises:
        UncoveredParameterError: such a parameter is complex.
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
    """The remedy that an error names if it is unknown whether examples meet."""
    if "not known" not in meeting:
        return ""
    return (
        ", or say examples='apart' if you know that they do not (jk.check_coverage tests it on "
        "your data)"
    )


def check_alone(program: Program, traced: Traced, layers: list[Layer]) -> None:
    """Refuse to run examples one by one if an output depends on other examples, or may.

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
    call: ModelCall,
    layers: list[Layer],
    estimator: Estimator,
    names: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Sum over examples of the squared gradient of each example's sum of terms.

    The estimator runs on each example by itself. Inside ``shard_map`` each device holds different
    examples, and the sum is over all devices; also over those of the mapped axes ``names``.

    Memory:
        ``CHUNK`` gradients of the uncovered parameters and their activations; a single one if the
        model has an operation that JAX cannot batch.
    """
    params, batch, key, state = call
    leaves = leaves_by_path(params)
    axes = tuple(sorted(set().union(*map(varying_axes, jax.tree.leaves(batch)))))
    # Without cast_varying the gradient of a replicated array would be summed over devices before it
    # is squared.
    uncovered = {
        layer.weight.path: jax.tree.reduce(cast_varying, batch, leaves[layer.weight.path])
        for layer in layers
    }
    number = batch.num_examples

    def squares(example: tuple[Batch, Estimator]) -> dict[str, Array]:
        one, its = example
        one = jax.tree.map(lambda x: x[None], one)

        def outputs_of(uncovered: dict[str, Array]) -> ArrayTree:
            return objective.outputs(with_leaves(params, uncovered), one.inputs, key, state)[0]

        outputs, vjp = jax.vjp(outputs_of, uncovered)
        terms = total_count(objective.heads(outputs, None, one.mask))

        def contribution(cotangents: ArrayTree) -> dict[str, Array]:
            cotangents = objective.in_batch(cotangents, one.mask, batch, names)
            # The cotangents belong to the mean of this example's terms, and times the number of
            # terms to their sum.
            return {
                path: jnp.square(x.astype(statistics_dtype(x.dtype)) * terms)
                for path, x in vjp(cotangents)[0].items()
            }

        return its.expectation(objective, outputs, one, contribution)

    # The loop must not run along a sharded axis.
    untracked = tuple(x for x in names if x not in axes and axes_apart((x,)))
    examples = replicated((batch, estimator.by_example(number, untracked)))
    some = lambda chunk, _: jax.vmap(squares)(chunk)
    try:
        rows = map_over_chunks(some, examples, CHUNK, in_loop=fast_convolutions)
    except NotImplementedError:  # an operation that JAX cannot batch, such as a grouped product
        rows = jax.lax.map(fast_convolutions(squares), examples)
    sums = {layer.name: sum_over_axis(rows[layer.weight.path], 0) for layer in layers}
    return sum_over_devices(sums, (*axes, *untracked))


# ---------------- losses that mark their outputs
#
# The batch of such a loss has no known form, so no example can be run by itself. If no term depends
# on rows of several examples, the gradient of one example's terms comes from the cotangents of its
# own rows, with all other rows zero. That takes one backward pass for each example.


def marked_diagonals(
    loss: Callable[..., Any],
    traced: Traced,
    at: Linearised,
    layers: Sequence[Layer],
    estimator: Estimator,
    names: tuple[str, ...] = (),
) -> dict[str, Array]:
    """Sum over examples of the squared gradient of each example's sum of terms.

    Args:
        loss: The loss.
        traced: The program.
        at: The program linearized at one point.
        layers: The layers.
        estimator: The Fisher type, with its key or labels.
        names: Mapped axes over whose devices the sum runs.

    Raises:
        UncoveredParameterError: inside ``shard_map``, where each device holds different examples.

    Memory:
        One backward pass, and the squares.
    """
    if any(map(varying_axes, jax.tree.leaves(at.outputs))):
        layer_names = ", ".join(repr(layer.name) for layer in layers)
        raise UncoveredParameterError(
            f"{layer_names}: is behind a weight that is computed from it, and its diagonal is one "
            "of single examples' gradients, which inside jax.shard_map are sums over devices: "
            "leave it out with layers=, or split the batch under jax.jit"
        )
    assert at.gradient is not None
    gradient = at.gradient

    def squares(cotangents: ArrayTree) -> dict[str, Array]:
        totals = []
        for marks, number in _marks_by_examples(traced):
            one = fast_convolutions(lambda n, marks=marks: of_example(n, marks, cotangents))
            totals.append(jax.lax.map(one, jnp.arange(number)))
        return jax.tree.map(lambda *chunks: sum(chunk.sum(0) for chunk in chunks), *totals)

    def of_example(n: Int[Array, ""], marks: set[int], cotangents: ArrayTree) -> dict[str, Array]:
        rows = [
            _row_alone(x, n) if k in marks else jnp.zeros_like(x) for k, x in enumerate(cotangents)
        ]
        grads = gradient(rows)
        return {
            layer.name: jnp.square(x.astype(statistics_dtype(x.dtype)))
            for layer in layers
            for x in [grads[layer.weight.path]]
        }

    direct = at._replace(vjp=lambda cotangents: cotangents, own=at.cotangents)
    sums = sum_over_devices(estimator.gathered(loss, direct, at.batch, squares), names)
    return {name: x * at.squares_to_sums.astype(x.dtype) for name, x in sums.items()}


def _row_alone(x: Array, n: Int[Array, ""]) -> Array:
    if not x.ndim:  # the only row
        return x
    is_row = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == n
    return jnp.where(is_row, x, jnp.zeros((), x.dtype))


def _marks_by_examples(traced: Traced) -> list[tuple[set[int], int]]:
    """Group the marks by their example axis; return each group with its number of examples."""
    table = traced.analysis.table
    axes = [traced.output_axes(k) for k in range(len(traced.marks))]
    leading = [table.atoms(mark_axes[0]) if mark_axes else () for mark_axes in axes]
    return [
        ({k for k, mark_axes in enumerate(leading) if mark_axes == atoms}, number)
        for atoms, number in traced.example_axes
    ]
