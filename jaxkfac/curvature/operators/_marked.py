"""The Gauss-Newton matrix of a scalar loss that marks its outputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkfac.curvature.operators._exact import chosen_paths, chosen_shapes
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import Leaves, fisher_of_terms, inner_products
from jaxkfac.factors import Head, MarkedTerms, number_kept, takes_key
from jaxkfac.interception import (
    Marked,
    check_arrays,
    check_function,
    leaves_by_path,
    lifted,
    marks_of,
    with_leaves,
)
from jaxkfac.linalg import statistics_dtype

PyTree = Any


def marked_gauss_newton(
    name: str,
    function: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    key: Any,
    chunk: int | None,
    only: str | None,
    state: PyTree = None,
) -> "MarkedGaussNewton":
    """The operator, once the loss marks its outputs.

    Raises:
        TypeError: it does not.
        ValueError: ``chunk`` is given, and the loss runs on the whole batch; or a state.
    """
    if state is not None:
        raise ValueError(f"{name}: state= needs a jk.Objective, not a scalar loss")
    check_function("objective", function, "loss(params, batch), or a jk.Objective")
    check_arrays("params", params)
    check_arrays("batch", batch)
    closed = jax.make_jaxpr(lambda *args: _call(function, *args))(params, batch, key)
    if not marks_of(closed.jaxpr):
        raise TypeError(
            f"{name}: expected a jk.Objective, or a scalar loss that marks its outputs "
            f"(jk.mark_outputs), whose outputs and loss terms are known, got {function!r}"
        )
    if chunk is not None:
        raise ValueError("chunk: a scalar loss runs on its whole batch; pass chunk=None")
    return MarkedGaussNewton(params, batch, key, function, chosen_paths(only, params))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MarkedGaussNewton(Operator):
    r"""$\sum_m \tfrac{w_m}{T_m} \sum_t J_t^\top F_t J_t$ over the marks of a scalar loss.

    Attributes as in ``ggn``; ``function`` and ``only`` are static.
    """

    params: Any
    batch: Any
    key: Any
    function: Callable[..., Any] = dataclasses.field(metadata={"static": True})
    only: tuple[str, ...] | None = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> PyTree:
        return chosen_shapes(self.params, self.only)

    @property
    def loss_terms(self) -> Array:
        return _loss_terms(self)

    def product(self, leaves: Leaves) -> Leaves:
        return _product(self, leaves)

    def forms(self, vectors: Sequence[Leaves]) -> Float[Array, "k k"]:
        return _forms(self, list(vectors))


def _call(function: Callable[..., Any], params: PyTree, batch: PyTree, key: Any) -> Any:
    return function(params, batch, key=key) if takes_key(function) else function(params, batch)


@jax.jit  # so that of the loss only what its masks are made of runs
def _loss_terms(operator: MarkedGaussNewton) -> Array:
    marks, outputs, chosen = _outputs(operator)
    at, out = outputs(chosen)
    return number_kept(_heads(marks, out, at))


@jax.jit
def _product(operator: MarkedGaussNewton, leaves: Leaves) -> Leaves:
    marks, outputs, chosen = _outputs(operator)
    (vector,) = _cast([leaves], chosen)
    at, vjp, out = jax.vjp(outputs, chosen, has_aux=True)
    moved = vjp(_curved(marks, out, at, _pushed(outputs, chosen, vector)))[0]
    return {path: x.astype(statistics_dtype(x.dtype)) for path, x in moved.items()}


@jax.jit
def _forms(operator: MarkedGaussNewton, vectors: list[Leaves]) -> Float[Array, "k k"]:
    """By forward passes, whose part without tangents the compiler merges."""
    marks, outputs, chosen = _outputs(operator)
    at, out = outputs(chosen)
    pushed = [_pushed(outputs, chosen, vector) for vector in _cast(vectors, chosen)]
    curved = [_curved(marks, out, at, y) for y in pushed]
    stacked = [jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (pushed, curved)]
    return inner_products(*stacked)


def _pushed(outputs: Callable[..., Any], chosen: Leaves, vector: Leaves) -> list[Array]:
    return jax.jvp(lambda c: outputs(c)[0], (chosen,), (vector,))[1]


def _outputs(operator: MarkedGaussNewton) -> tuple[Any, Callable[[Leaves], Any], Leaves]:
    """The marks, what they say of outputs, as a function of the chosen leaves, and these."""
    given = operator.params, operator.batch, operator.key
    closed = jax.make_jaxpr(lambda *args: _call(operator.function, *args))(*given)
    marks = marks_of(closed.jaxpr)

    def outputs(chosen: Leaves) -> tuple[list[Array], Marked]:
        args = jax.tree.leaves((with_leaves(operator.params, chosen), *given[1:]))
        out = lifted(closed.jaxpr, closed.consts, args, [None] * len(marks))
        return out.outputs, out

    found = leaves_by_path(operator.params)
    return marks, outputs, {path: found[path] for path in operator.leaves}


def _cast(vectors: list[Leaves], chosen: Leaves) -> list[Leaves]:
    return [{path: v[path].astype(x.dtype) for path, x in chosen.items()} for v in vectors]


def _heads(marks: Any, out: Marked, at: list[Array]) -> list[Head]:
    return MarkedTerms(marks, out.weights, out.masks).heads(at)


def _curved(marks: Any, out: Marked, at: list[Array], pushed: list[Array]) -> list[Array]:
    return [
        fisher_of_terms(head, y, head.count / jnp.asarray(head.weight).astype(head.count.dtype))
        for head, y in zip(_heads(marks, out, at), pushed, strict=True)
    ]
