"""The exact curvature of a batch as an operator, for objectives and losses with marks."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxkfac._arguments import (
    ArrayTree,
    check_arrays,
    check_function,
    check_params,
    leaves_by_path,
    partition,
    with_leaves,
)
from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac._mapped_axes import sum_over_devices
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import (
    FORMS,
    Chunk,
    Leaves,
    fisher_of_terms,
    inner_products,
)
from jaxkfac.factors import (
    Batch,
    Head,
    MarkedTerms,
    ModelCall,
    Objective,
    check_label_values,
    number_of_terms,
    takes_key,
)
from jaxkfac.interception import Marked, OutputMark, fast_convolutions, jaxpr_of, lifted, marks_of
from jaxkfac.linalg import statistics_dtype, sum_over_chunks

# ---------------- checks of chunks


def check_chunk(chunk: int | None, examples: ArrayTree) -> None:
    """Refuse a chunk below one, and arrays whose first axis is not the examples.

    Raises:
        ValueError: naming the shape that does not fit.
    """
    if chunk is None:
        return
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: expected a number of examples, at least 1, or None")
    leaves = jax.tree.leaves(examples)
    number = leaves[0].shape[0]
    for leaf in leaves:
        if leaf.shape[:1] != (number,):
            raise ValueError(
                f"chunk={chunk} cuts the batch along its first axis, of {number} examples, and "
                f"an array of it has shape {leaf.shape}; pass chunk=None"
            )


# ---------------- the curvature of an objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExactOperator(Operator):
    """Curvature of an ``Objective`` on one batch, multiplied but never formed.

    Attributes:
        params: All parameters.
        batch: The full batch.
        labels: ``(N, samples, *targets)`` in place of the batch's targets, or an ``Estimator``
            for each example, stacked, or ``None``.
        key: For dropout.
        state: What a call of the model changes, or ``None``.
        objective: The objective, static.
        rule: The product on one chunk, static.
        chunk: Number of examples in a chunk, static.
        only: Paths of the leaves it acts on, static; ``None`` for all.
        axes: Mapped axes whose devices hold the rest of the batch, static.
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
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def like(self) -> ArrayTree:
        return chosen_shapes(self.params, self.only)

    @property
    def loss_terms(self) -> Array:
        return number_of_terms(self._heads())

    def product(self, leaves: Leaves) -> Leaves:
        return _product(self, leaves)

    def forms(self, vectors: Sequence[Leaves]) -> Float[Array, "k k"]:
        form = FORMS.get(self.rule)
        return super().forms(vectors) if form is None else _forms(self, form, list(vectors))

    def summed(self, function: Callable[[Chunk], Any]) -> Any:
        """The sum of ``function`` over the chunks of all devices."""
        per_chunk, examples = self.over_chunks(function), (self.batch, self.labels)
        total = sum_over_chunks(per_chunk, examples, self.chunk, in_loop=fast_convolutions)
        return sum_over_devices(total, self.axes)

    def over_chunks(self, function: Callable[[Chunk], Any]) -> Callable[[Any, Any], Any]:
        """``function`` of a chunk, as a function of the chunk's ``(batch, labels)`` and index."""
        # Counts are those of the full batch: a chunk's mask keeps another number of terms, and the
        # chunks' shares have to add up to the mean over all of them.
        by_path, counts = leaves_by_path(self.params), [head.count for head in self._heads()]
        chosen = {path: by_path[path] for path in self.leaves}

        def per_chunk(examples: tuple[Batch, Any], index: Array | None) -> Any:
            key = self.key
            if key is not None and index is not None:
                # Each chunk draws its own noise, the same in every product: the map stays linear.
                key = jax.random.fold_in(key, index)
            chunk = Chunk(self.objective, self.params, chosen, *examples, counts, key, self.state)
            return function(chunk)

        return per_chunk

    def _heads(self) -> list[Head]:
        """The outputs for the full batch, as shapes, with likelihood and mask.

        Their counts are those of all devices.
        """
        # Shapes suffice: the number of terms depends on the mask alone.
        outputs = jax.eval_shape(
            lambda params, inputs: self.objective.outputs(params, inputs, self.key, self.state)[0],
            self.params,
            self.batch.inputs,
        )
        terms = self.objective.of_batch(outputs, self.batch, self.axes)
        return terms.heads(outputs, None, self.batch.mask)


# An operator is a pytree whose static part compares equal from product to product, so consecutive
# products outside jit compile once.
@jax.jit
def _product(operator: ExactOperator, leaves: Leaves) -> Leaves:
    structs = operator.leaves
    # A tangent must have the dtype of its primal; solvers pass vectors in the widest dtype of all
    # leaves.
    vector = {path: x.astype(structs[path].dtype) for path, x in leaves.items()}

    def widened(chunk: Chunk) -> Leaves:
        out = operator.rule(chunk, vector)
        # Widened before the chunks are added: a sum of many chunks in 16 bits stops growing.
        return {path: x.astype(statistics_dtype(x.dtype)) for path, x in out.items()}

    return operator.summed(widened)


@functools.partial(jax.jit, static_argnums=1)
def _forms(
    operator: ExactOperator, form: Callable[[Chunk, Leaves], Array], vectors: list[Leaves]
) -> Float[Array, "k k"]:
    structs = operator.leaves
    stacked = {
        path: jnp.stack([vector[path].astype(struct.dtype) for vector in vectors])
        for path, struct in structs.items()
    }
    return operator.summed(lambda chunk: form(chunk, stacked))


def checked_batch(
    objective: Objective, call: ModelCall, chunk: int | None, labels: ArrayTree | None = None
) -> Batch:
    """Check that batch and ``labels`` fit the objective and can be split into chunks.

    Raises:
        ValueError: targets, labels or a mask that do not fit the outputs, or arrays whose first
            axis is not the examples.
    """
    params, batch, key, state = call
    check_arrays("params", params)
    check_params(leaves_by_path(params))
    out = objective.batch(batch)
    check_chunk(chunk, out)

    def check(params: ArrayTree, inputs: ArrayTree) -> None:
        outputs, _ = objective.outputs(params, inputs, key, state)
        objective.check(outputs, out.targets, out.mask)
        if labels is not None:
            check_label_values(objective, outputs, labels, out.mask)

    # Targets, mask and labels are no arguments here, so they keep the values that are checked.
    jax.eval_shape(check, params, out.inputs)
    return out


def shapes(tree: ArrayTree) -> ArrayTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def chosen_shapes(params: ArrayTree, only: tuple[str, ...] | None) -> ArrayTree:
    """Shapes and dtypes of the parameters, or ``{path: leaf}`` of the chosen ones."""
    if only is None:
        return shapes(params)
    leaves = leaves_by_path(params)
    return {path: shapes(leaves[path]) for path in only}


def chosen_paths(only: str | None, params: ArrayTree) -> tuple[str, ...] | None:
    """The paths of floating parameters that a pattern matches in full; ``None`` for ``None``.

    Raises:
        UnknownLayerError: the pattern matches nothing, or is no regular expression.
    """
    if only is None:
        return None
    paths = list(partition(params)[0])
    try:
        matches = tuple(path for path in paths if re.fullmatch(only, path))
    except re.error as error:
        raise UnknownLayerError(f"only={only!r} is not a regular expression: {error}") from None
    if not matches:
        raise UnknownLayerError(
            f"only={only!r} matches no parameter in full; the nearest paths are "
            f"{nearest(only, paths)}"
        )
    return matches


# ---------------- scalar losses that mark their outputs


def marked_gauss_newton(
    name: str,
    function: Callable[..., Any],
    call: ModelCall,
    chunk: int | None,
    only: str | None,
    axes: tuple[str, ...] = (),
) -> "MarkedGaussNewton":
    """Build the operator of a loss that marks its outputs.

    Raises:
        TypeError: the loss marks no outputs.
        ValueError: ``chunk`` is given, but the loss runs on the full batch; or a state is given.
    """
    params, batch, key, state = call
    if state is not None:
        raise ValueError(f"{name}: state= needs a jk.Objective, not a scalar loss")
    check_function("objective", function, "loss(params, batch), or a jk.Objective")
    check_arrays("params", params)
    check_arrays("batch", batch)
    closed, _ = jaxpr_of(lambda *args: _call(function, *args), params, batch, key)
    if not marks_of(closed.jaxpr):
        raise TypeError(
            f"{name}: expected a jk.Objective, or a scalar loss that marks its outputs "
            f"(jk.mark_outputs), whose outputs and loss terms are known, got {function!r}"
        )
    if chunk is not None:
        raise ValueError("chunk: a scalar loss runs on its whole batch; pass chunk=None")
    return MarkedGaussNewton(params, batch, key, function, chosen_paths(only, params), axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MarkedGaussNewton(Operator):
    r"""$\sum_m \tfrac{w_m}{T_m} \sum_t J_t^\top F_t J_t$ over the marks of a scalar loss.

    Attributes as in ``ggn``; ``function``, ``only`` and the mapped ``axes`` are static.
    """

    params: Any
    batch: Any
    key: Any
    function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    only: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def like(self) -> ArrayTree:
        return chosen_shapes(self.params, self.only)

    @property
    def loss_terms(self) -> Array:
        return _loss_terms(self)

    def product(self, leaves: Leaves) -> Leaves:
        return _marked_product(self, leaves)

    def forms(self, vectors: Sequence[Leaves]) -> Float[Array, "k k"]:
        return _marked_forms(self, list(vectors))


def _call(
    function: Callable[..., Any], params: ArrayTree, batch: ArrayTree, key: Key[Array, ""] | None
) -> Any:
    return function(params, batch, key=key) if takes_key(function) else function(params, batch)


@jax.jit  # runs only the part of the loss that computes its masks
def _loss_terms(operator: MarkedGaussNewton) -> Array:
    marks, outputs, chosen = _outputs(operator)
    at, out = outputs(chosen)
    return number_of_terms(_heads(marks, out, at, operator.axes))


@jax.jit
def _marked_product(operator: MarkedGaussNewton, leaves: Leaves) -> Leaves:
    marks, outputs, chosen = _outputs(operator)
    (vector,) = _cast([leaves], chosen)
    at, vjp, out = jax.vjp(outputs, chosen, has_aux=True)
    pushed = _pushed(outputs, chosen, vector)
    moved = vjp(_curved(_heads(marks, out, at, operator.axes), pushed))[0]
    product = {path: x.astype(statistics_dtype(x.dtype)) for path, x in moved.items()}
    return sum_over_devices(product, operator.axes)


@jax.jit
def _marked_forms(operator: MarkedGaussNewton, vectors: list[Leaves]) -> Float[Array, "k k"]:
    """Forms by forward passes; the compiler merges their shared part without tangents."""
    marks, outputs, chosen = _outputs(operator)
    at, out = outputs(chosen)
    pushed = [_pushed(outputs, chosen, vector) for vector in _cast(vectors, chosen)]
    heads = _heads(marks, out, at, operator.axes)
    curved = [_curved(heads, y) for y in pushed]
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (pushed, curved)]
    return sum_over_devices(inner_products(*stacked), operator.axes)


def _pushed(outputs: Callable[..., Any], chosen: Leaves, vector: Leaves) -> list[Array]:
    return jax.jvp(lambda c: outputs(c)[0], (chosen,), (vector,))[1]


def _outputs(operator: MarkedGaussNewton) -> tuple[Any, Callable[[Leaves], Any], Leaves]:
    """The marks, a function from the chosen leaves to the marked outputs, and these leaves."""
    call_args = operator.params, operator.batch, operator.key
    closed, _ = jaxpr_of(lambda *args: _call(operator.function, *args), *call_args)
    marks = marks_of(closed.jaxpr)

    def outputs(chosen: Leaves) -> tuple[list[Array], Marked]:
        args = jax.tree.leaves((with_leaves(operator.params, chosen), *call_args[1:]))
        out = lifted(closed.jaxpr, closed.consts, args, [None] * len(marks))
        return out.outputs, out

    by_path = leaves_by_path(operator.params)
    return marks, outputs, {path: by_path[path] for path in operator.leaves}


def _cast(vectors: list[Leaves], chosen: Leaves) -> list[Leaves]:
    return [{path: v[path].astype(x.dtype) for path, x in chosen.items()} for v in vectors]


def _heads(
    marks: Sequence[OutputMark], out: Marked, at: list[Array], axes: tuple[str, ...]
) -> list[Head]:
    return MarkedTerms(marks, out.weights, out.masks).over_devices(at, axes).heads(at)


def _curved(heads: Sequence[Head], pushed: list[Array]) -> list[Array]:
    return [
        fisher_of_terms(head, y, head.count / jnp.asarray(head.weight).astype(head.count.dtype))
        for head, y in zip(heads, pushed, strict=True)
    ]
