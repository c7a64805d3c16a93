"""Convolutions with their axes in the order for which XLA's CPU compiler has a fast kernel."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jaxtyping import Array

from jaxkfac._jaxpr_compat import (
    Eqn,
    Jaxpr,
    Literal,
    Var,
    bind,
    body_of,
    branches_of,
    call_kind,
    evaluate,
    is_layer,
    is_var,
    varying_axes,
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
        if _has_convolutions(closed.jaxpr):
            out = _run(closed.jaxpr, closed.consts, leaves)
        else:
            out = jex.jaxpr_as_fun(closed)(*leaves)
        # A result that is known at trace time is a literal, which is no jax.Array.
        return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, out))

    return run


def _inner(eqn: Eqn) -> list[tuple[Jaxpr, Any]]:
    """The jaxprs of an equation whose convolutions are to be rewritten."""
    match call_kind(eqn):
        case "jit" if not _says_where(eqn) and not is_layer(eqn):
            return [body_of(eqn)]
        case "checkpoint" if not any(map(_lies_on_mesh, eqn.invars)):
            return [body_of(eqn)]
        case "cond" if not any(map(_lies_on_mesh, eqn.invars)) and not _is_by_platform(eqn):
            return branches_of(eqn)
        case _:
            return []


def _says_where(eqn: Eqn) -> bool:
    """Whether a jit states shardings or donates, so that it must stay a jit."""
    places = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    stated = any(isinstance(s, jax.sharding.Sharding) for s in places)
    return stated or any(eqn.params.get("donated_invars", ()))


def _is_by_platform(eqn: Eqn) -> bool:
    """Whether the branches are for platforms, as those of a transposed convolution are."""
    return eqn.params.get("branches_platforms") is not None


def _lies_on_mesh(operand: Var | Literal) -> bool:
    """Whether the type of an operand names mesh axes; a rewritten body would lose them."""
    aval: Any = operand.aval
    explicit = aval.sharding.mesh.explicit_axes if hasattr(aval, "sharding") else ()
    return bool(explicit or (hasattr(aval, "manual_axis_type") and varying_axes(aval)))


def _is_touched(eqn: Eqn) -> bool:
    if eqn.primitive is jax.lax.conv_general_dilated_p:
        return eqn.params["dimension_numbers"] != _canonical(eqn.invars[0].aval.ndim)
    return any(_has_convolutions(jaxpr) for jaxpr, _ in _inner(eqn))


def _has_convolutions(jaxpr: Jaxpr) -> bool:
    return any(map(_is_touched, jaxpr.eqns))


def _canonical(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """Data with examples, space, channels; kernels with space, inputs, outputs."""
    space = tuple(range(1, ndim - 1))
    of_data = (0, ndim - 1, *space)
    return jax.lax.ConvDimensionNumbers(
        of_data, (ndim - 1, ndim - 2, *(d - 1 for d in space)), of_data
    )


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a program, computed piece by piece."""
    names = (*jaxpr.constvars, *jaxpr.invars)
    env: dict[Var, Any] = dict(zip(names, (*consts, *args), strict=True))

    def read(operand: Var | Literal) -> Any:
        return env[operand] if is_var(operand) else operand.val  # pyright: ignore

    for eqns, invars, outvars in _pieces(jaxpr):
        if len(eqns) == 1 and _is_touched(eqns[0]):
            out = _replaced(eqns[0], [read(v) for v in eqns[0].invars])
            outvars = eqns[0].outvars
        else:
            out = evaluate(eqns, invars, outvars, jaxpr)(*map(read, invars))
        env.update(zip(outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _pieces(jaxpr: Jaxpr) -> Iterator[tuple[list[Eqn], list[Var], list[Var]]]:
    """Groups of equations to run together, the variables each reads, and those read later."""
    groups: list[list[Eqn]] = []
    for eqn in jaxpr.eqns:
        alone = _is_touched(eqn)
        if alone or not groups or _is_touched(groups[-1][-1]):
            groups.append([])
        groups[-1].append(eqn)
    later = [{v for v in jaxpr.outvars if is_var(v)}]
    for group in reversed(groups):
        later.append(later[-1] | {v for eqn in group for v in eqn.invars if is_var(v)})
    # `later` goes backward from what is read after the last group; its last entry, which includes
    # what the first group itself reads, belongs to none.
    for group, needed in zip(groups, later[-2::-1], strict=True):
        written = dict.fromkeys(v for eqn in group for v in eqn.outvars)
        read = dict.fromkeys(v for eqn in group for v in eqn.invars if is_var(v))
        yield group, [v for v in read if v not in written], [v for v in written if v in needed]


def _replaced(eqn: Eqn, operands: list[Any]) -> list[Any]:
    """The results of an equation that is, or contains, convolutions."""
    params = eqn.params
    # The equation may have been traced in another context than this one, such as `enable_x64`.
    with eqn.ctx.manager:
        match call_kind(eqn):
            case "jit":
                return _run(*body_of(eqn), operands)
            case "checkpoint":
                closed = _rewritten(*body_of(eqn))
                of_body = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
                unnamed = closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
                body = closed.jaxpr.replace(constvars=[], invars=list(of_body), debug_info=unnamed)
                new, operands = {**params, "jaxpr": body}, [*closed.consts, *operands]
            case "cond":
                branches = tuple(_rewritten(*branch) for branch in branches_of(eqn))
                new = {**params, "branches": branches}
            case _:
                return [_convolved(eqn, *operands)]
        return eqn.primitive.bind(*operands, **new)


def _rewritten(jaxpr: Jaxpr, consts: Sequence[Any]) -> jex.ClosedJaxpr:
    """The program with its convolutions transposed."""
    # The inputs lose weak types and shardings here, so a body over mesh axes is left alone
    # (`_lies_on_mesh`).
    like = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(jaxpr, consts, args))(*like)


def _convolved(eqn: Eqn, x: Array, kernel: Array) -> Array:
    numbers = eqn.params["dimension_numbers"]
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
