"""The exact curvature of a batch as an operator: which leaves, which chunk, which product."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.curvature.operators._chunks import check_chunk
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import FORMS, Chunk, Leaves
from jaxkfac.factors import Batch, Head, Objective, check_label_values, number_kept
from jaxkfac.interception import (
    check_arrays,
    check_params,
    fast_convolutions,
    leaves_by_path,
    partition,
)
from jaxkfac.linalg import statistics_dtype, sum_over_chunks

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExactOperator(Operator):
    """Curvature of an ``Objective`` on one batch, multiplied but never formed.

    Attributes:
        params: All parameters.
        batch: The batch, whole.
        labels: ``(N, samples, *targets)`` in place of the batch's targets, or an ``Estimator``
            for each example, stacked, or ``None``.
        key: For dropout.
        state: What a call of the model changes, or ``None``.
        objective: The objective, static.
        rule: The product on one chunk, static.
        chunk: Examples a chunk, static.
        only: Paths of the leaves it acts on, static; ``None`` is all.
    """

    params: Any
    batch: Any
    labels: Any
    key: Any
    state: Any
    objective: Any = dataclasses.field(metadata={"static": True})
    rule: Callable[[Chunk, Leaves], Leaves] = dataclasses.field(metadata={"static": True})
    chunk: int | None = dataclasses.field(metadata={"static": True})
    only: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> PyTree:
        return chosen_shapes(self.params, self.only)

    @property
    def loss_terms(self) -> Array:
        return number_kept(self._heads())

    def product(self, leaves: Leaves) -> Leaves:
        return _product(self, leaves)

    def forms(self, vectors: Sequence[Leaves]) -> Float[Array, "k k"]:
        form = FORMS.get(self.rule)
        return super().forms(vectors) if form is None else _forms(self, form, list(vectors))

    def over_chunks(self, function: Callable[[Chunk], Any]) -> Callable[[Any, Any], Any]:
        """``function`` of a chunk, as one of its ``(batch, labels)`` and its index."""
        found, counts = leaves_by_path(self.params), [head.count for head in self._heads()]
        chosen = {path: found[path] for path in self.leaves}

        def per_chunk(examples: tuple[Batch, Any], index: Any) -> Any:
            key = self.key
            if key is not None and index is not None:
                key = jax.random.fold_in(key, index)
            chunk = Chunk(self.objective, self.params, chosen, *examples, counts, key, self.state)
            return function(chunk)

        return per_chunk

    def _heads(self) -> list[Head]:
        """The outputs for the whole batch, as shapes, and what belongs to each."""
        outputs = jax.eval_shape(
            lambda params, inputs: self.objective.outputs(params, inputs, self.key, self.state)[0],
            self.params,
            self.batch.inputs,
        )
        return self.objective.heads(outputs, None, self.batch.mask)


# An operator is a pytree whose static part compares equal from product to product, so products
# written one after the other outside jit compile once.
@jax.jit
def _product(operator: ExactOperator, leaves: Leaves) -> Leaves:
    structs = operator.leaves
    vector = {path: x.astype(structs[path].dtype) for path, x in leaves.items()}

    def widened(chunk: Chunk) -> Leaves:
        out = operator.rule(chunk, vector)
        return {path: x.astype(statistics_dtype(x.dtype)) for path, x in out.items()}

    return sum_over_chunks(
        operator.over_chunks(widened),
        (operator.batch, operator.labels),
        operator.chunk,
        in_loop=fast_convolutions,
    )


@functools.partial(jax.jit, static_argnums=1)
def _forms(
    operator: ExactOperator, form: Callable[[Chunk, Leaves], Array], vectors: list[Leaves]
) -> Float[Array, "k k"]:
    structs = operator.leaves
    stacked = {
        path: jnp.stack([vector[path].astype(struct.dtype) for vector in vectors])
        for path, struct in structs.items()
    }
    return sum_over_chunks(
        operator.over_chunks(lambda chunk: form(chunk, stacked)),
        (operator.batch, operator.labels),
        operator.chunk,
        in_loop=fast_convolutions,
    )


def checked_batch(
    objective: Objective,
    params: PyTree,
    batch: Any,
    key: Any,
    chunk: int | None,
    labels: Any = None,
    state: PyTree | None = None,
) -> Batch:
    """The batch, once it and any ``labels`` fit the objective and it can be cut.

    Raises:
        ValueError: targets, labels or a mask that do not fit the outputs, or arrays without the
            examples first.
    """
    check_arrays("params", params)
    check_params(leaves_by_path(params))
    out = objective.batch(batch)
    check_chunk(chunk, out)

    def check(params: PyTree, inputs: Any) -> None:
        outputs, _ = objective.outputs(params, inputs, key, state)
        objective.check(outputs, out.targets, out.mask)
        if labels is not None:
            check_label_values(objective, outputs, labels, out.mask)

    jax.eval_shape(check, params, out.inputs)
    return out


def shapes(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def chosen_shapes(params: PyTree, only: tuple[str, ...] | None) -> PyTree:
    """Shapes and dtypes of the parameters, or ``{path: leaf}`` of the chosen ones."""
    if only is None:
        return shapes(params)
    leaves = leaves_by_path(params)
    return {path: shapes(leaves[path]) for path in only}


def chosen_paths(only: str | None, params: PyTree) -> tuple[str, ...] | None:
    """The paths of floating parameters that a pattern matches in full; ``None`` for ``None``.

    Raises:
        UnknownLayerError: the pattern matches nothing, or is no regular expression.
    """
    if only is None:
        return None
    paths = list(partition(params)[0])
    try:
        found = tuple(path for path in paths if re.fullmatch(only, path))
    except re.error as error:
        raise UnknownLayerError(f"only={only!r} is not a regular expression: {error}") from None
    if not found:
        raise UnknownLayerError(
            f"only={only!r} matches no parameter in full; the nearest paths are "
            f"{nearest(only, paths)}"
        )
    return found
