"""Convolutions with their axes in the order for which XLA's CPU compiler has a fast kernel."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac._interpreter import Replacer, equations_in
from jaxkfac._jaxpr_compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    bind,
    bodies_of,
    body_of,
    call_kind,
    is_layer,
    states_placement,
    varying_axes,
    without_constants,
)

Result = TypeVar("Result")


def fast_convolutions(fn: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap the body of a loop or branch so that its convolutions run fast on a CPU.

    XLA's CPU compiler has one kernel, for examples first and channels last, and it brings
    convolutions into that order only in the outermost computation of a program (jaxlib 0.8.1 and
    0.10.2). In a branch or a loop, convolutions of a derivative have another order and take 28
    times as long (``python -m benchmarks.convolutions``). They are therefore transposed here. On
    other platforms nothing changes, nor in a function without convolutions.

    Some convolutions stay unchanged: those in loops of the function itself, in its custom
    derivatives, in a ``jit`` that states shardings or donates, and in branches and checkpoints over
    explicit or manual mesh axes. In a model whose channels come first, XLA merges the
    transpositions back into the convolution.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Result:
        closed, shapes = jax.make_jaxpr(lambda args: fn(*args), return_shape=True)(args)
        leaves = jax.tree.leaves(args)
        out = _FastConvolutions().run(closed.jaxpr, closed.consts, leaves)
        # A result that is known at trace time is a literal, which is no jax.Array.
        return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, out))

    return run


class _FastConvolutions(Replacer):
    """Transposes convolutions to the order of the fast kernel."""

    def touches(self, eqn: Eqn) -> bool:
        return any(map(_is_slow, equations_in([eqn], _is_entered)))

    def replaced(self, eqn: Eqn, values: list[Any]) -> Sequence[Any]:
        if call_kind(eqn) is None:
            return [_convolved(eqn, *values)]
        if call_kind(eqn) == "jit":
            return self.run(*body_of(eqn), values)
        bodies = [self._rewritten(*body) for body in bodies_of(eqn)]
        new: dict[str, Any] = {"branches": tuple(bodies)}
        if call_kind(eqn) == "checkpoint":
            values = [*values, *bodies[0].consts]
            new = {"jaxpr": without_constants(bodies[0]).jaxpr}
        return eqn.primitive.bind(*values, **eqn.params | new)

    def _rewritten(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
        # The inputs lose weak types and shardings here, so a body over mesh axes is left alone
        # (`_lies_on_mesh`).
        like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        return jax.make_jaxpr(lambda *args: self.run(jaxpr, consts, args))(*like)


def _is_slow(eqn: Eqn) -> bool:
    is_convolution = eqn.primitive is jax.lax.conv_general_dilated_p
    return is_convolution and _numbers(eqn) != _canonical(eqn.invars[0].aval.ndim)


def _is_entered(eqn: Eqn) -> bool:
    """Whether the convolutions inside an equation are to be rewritten."""
    if call_kind(eqn) == "jit":
        return not states_placement(eqn) and not is_layer(eqn)
    # The branches of a transposed convolution are for platforms.
    by_platform = eqn.params.get("branches_platforms") is not None
    entered = call_kind(eqn) in ("checkpoint", "cond") and not by_platform
    return entered and not any(map(_lies_on_mesh, eqn.invars))


def _lies_on_mesh(operand: Var | Literal) -> bool:
    """Whether the type of an operand names mesh axes; a rewritten body would lose them."""
    aval: Any = operand.aval
    explicit = aval.sharding.mesh.explicit_axes if hasattr(aval, "sharding") else ()
    return bool(explicit or (hasattr(aval, "manual_axis_type") and varying_axes(aval)))


def _numbers(eqn: Eqn) -> jax.lax.ConvDimensionNumbers:
    return eqn.params["dimension_numbers"]


def _canonical(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """Data with examples, space, channels; kernels with space, inputs, outputs."""
    space = tuple(range(1, ndim - 1))
    of_data = (0, ndim - 1, *space)
    return jax.lax.ConvDimensionNumbers(
        of_data, (ndim - 1, ndim - 2, *(d - 1 for d in space)), of_data
    )


def _convolved(eqn: Eqn, x: Array, kernel: Array) -> Array:
    numbers = _numbers(eqn)
    examples, features, *space = numbers.lhs_spec
    outputs, inputs, *window = numbers.rhs_spec
    of_examples, of_features, *of_space = numbers.out_spec
    back = [0] * x.ndim
    for place, axis in enumerate((of_examples, *of_space, of_features)):
        # The inverse of the outputs' order, since the result comes out as examples, space,
        # channels.
        back[axis] = place

    def canonical(x: Array, kernel: Array) -> Array:
        x = x.transpose(examples, *space, features)
        kernel = kernel.transpose(*window, inputs, outputs)
        params = {**eqn.params, "dimension_numbers": _canonical(x.ndim)}
        return eqn.primitive.bind(x, kernel, **params).transpose(back)

    return jax.lax.platform_dependent(x, kernel, cpu=canonical, default=bind(eqn))
