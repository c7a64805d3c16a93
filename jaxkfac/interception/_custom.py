"""Parameters inside functions with a custom derivative.

The user's rule gives the gradient: the call runs unchanged. Statistics come from a second program
beside it, which gets the call's cotangent and whose values nobody reads. For a ``custom_vjp`` the
second program is the primal, differentiated by JAX; for a ``custom_jvp`` it is the rule itself, in
which the tangents of the parameters meet data.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree, partition, with_leaves
from jaxkfac._interpreter import live_inputs
from jaxkfac._jaxpr_compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Var,
    body_of,
    call_kind,
    evaluate,
    is_var,
)
from jaxkfac.interception._functions import is_function
from jaxkfac.interception._kind import Data, Value
from jaxkfac.interception._plan import Facts
from jaxkfac.interception._structured import Interpret, Interpreted, Scans
from jaxkfac.interception.values._axes import fresh
from jaxkfac.interception.values._values import Constant, Parameter

# ---------------- the program of the statistics, beside the call


APART = "jaxkfac_apart"  # the name of a call in which no layer is looked for

_NO_DERIVATIVE = frozenset(
    "round floor ceil sign nextafter pure_callback io_callback ffi_call pallas_call".split()
)


def is_rule(eqn: Eqn) -> bool:
    """Whether statistics come from the rule of the custom derivative: for ``custom_jvp``."""
    return eqn.primitive.name.startswith("custom_jvp")


def step_without_derivative(eqn: Eqn) -> str:
    """A primitive inside a custom derivative whose own derivative is useless, or ``""``.

    Such a primitive has the derivative zero, or none, and the custom rule replaces it. So the
    primal, differentiated by JAX, would give no statistics.
    """
    primitives: list[str] = []

    def note(_: int, inner: Eqn, results: set[int]) -> None:
        before = [v.aval for v in inner.invars[:1] if hasattr(v.aval, "dtype")]
        after = inner.outvars[0].aval
        cast = inner.primitive.name == "convert_element_type" and bool(before)
        coarse = cast and jnp.issubdtype(before[0].dtype, jnp.floating) and _is_coarse(after.dtype)
        if inner.primitive.name in _NO_DERIVATIVE or coarse:
            primitives.append(inner.primitive.name)

    # An equation counts only if a result depends on it: a `round` for a monitor does not make the
    # derivative useless.
    body, _ = body_of(eqn)
    live_inputs(body, range(len(body.outvars)), note)
    return primitives[-1] if primitives else ""


def _is_coarse(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize < 2


def interpret_primal(
    facts: Facts, interpret: Interpret, eqn: Eqn, ins: Sequence[Value], scans: Scans
) -> Interpreted:
    """The results of a ``custom_vjp``, and the plan for its primal."""
    outs, plan = interpret(*body_of(eqn), ins, scans)
    results = [
        Data(facts.unique(), v.axes) if isinstance(v, Data) else facts.outside(v, eqn) for v in outs
    ]
    return results, plan


def interpret_rule(
    facts: Facts, interpret: Interpret, eqn: Eqn, ins: Sequence[Value], scans: Scans
) -> Interpreted:
    """The results of a ``custom_jvp``, and the plan for its rule.

    The results are those of the primal with constant parameters. The rule too gets the parameters
    as constants, and their tangents in the place of parameters.
    """
    # In the primal the parameters are constants, so that no layer is found there a second time: the
    # rule has equations of its own.
    fixed = [Constant(v.number) if isinstance(v, Parameter) else v for v in ins]
    outs, _ = interpret(*body_of(eqn), fixed, scans)
    primals, tangents = operands_of(eqn)
    closed = rule_of(eqn)
    value_of = of_variables(eqn, ins)
    inside = [of_variables(eqn, fixed)[v] for v in primals]
    inside += [_tangent(facts, value_of[v]) for v in tangents]
    _, plan = interpret(closed.jaxpr, closed.consts, inside, scans)
    results: list[Value] = [
        Data(facts.unique(), v.axes if isinstance(v, Data) else fresh(facts.table, w.aval.shape))
        for v, w in zip(outs, eqn.outvars, strict=True)
    ]
    return results, plan


def _tangent(facts: Facts, value: Value) -> Value:
    number = facts.number(("tangent", value.number))
    if isinstance(value, Data):
        return Data(number, value.axes)
    return dataclasses.replace(value, number=number)


def operands_of(eqn: Eqn) -> tuple[list[Var], list[Var]]:
    """The variables that an equation reads, without repeats, and those of them with tangents."""
    primals = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
    return primals, [v for v, d in zip(primals, _floats(primals), strict=True) if d]


def of_variables(eqn: Eqn, operands: Sequence[Any]) -> dict[Var, Any]:
    """The values of the variables that an equation reads; literals, which have no hash, are out."""
    return {v: x for v, x in zip(eqn.invars, operands, strict=True) if is_var(v)}


def _floats(variables: Sequence[Var]) -> list[bool]:
    return [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in variables]


def call_of(eqn: Eqn) -> Callable[..., list[Any]]:
    """The call as a function of the variables that it reads, without repeats."""
    return evaluate([eqn], operands_of(eqn)[0], eqn.outvars, body_of(eqn)[0])


def rule_of(eqn: Eqn, moving: Sequence[Var] | None = None, *, forward: bool = True) -> ClosedJaxpr:
    """The program of a custom derivative's tangents, or of its operands' cotangents.

    Args:
        eqn: The call.
        moving: The variables that have tangents; by default all that can have some.
        forward: Whether the program is a function of the call's variables and of the tangents of
            those that move; otherwise of its variables and the cotangents of its results.
    """
    primals, tangents = operands_of(eqn)
    moving = tangents if moving is None else moving
    is_float = _floats(eqn.outvars)

    # A rule may return NumPy's numbers, such as the zeros of a result that is constant.
    def derivative(values: list[Array], seeds: list[Array]) -> list[Any]:
        run, at = _run_with(eqn, values, moving)

        def floats(diff: list[Array]) -> list[Any]:
            return [x for x, d in zip(run(diff), is_float, strict=True) if d]

        return jax.jvp(floats, (at,), (seeds,))[1] if forward else jax.vjp(floats, at)[1](seeds)[0]

    results = [v for v, d in zip(eqn.outvars, is_float, strict=True) if d]
    return jax.make_jaxpr(derivative)(shapes_of(primals), shapes_of(moving if forward else results))


def _run_with(
    eqn: Eqn, values: Sequence[Array], moving: Sequence[Var]
) -> tuple[Callable[..., list[Any]], list[Array]]:
    """The call as a function of its operands that move, and their values."""
    at = dict(zip(operands_of(eqn)[0], values, strict=True))

    def run(diff: list[Array]) -> list[Any]:
        return call_of(eqn)(*(at | dict(zip(moving, diff, strict=True))).values())

    return run, [at[v] for v in moving]


def shapes_of(variables: Sequence[Var]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of variables, with which a program can be traced."""
    return [
        jax.ShapeDtypeStruct(
            v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
        )
        for v in variables
    ]


def opaque_call(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A call in which no layer is looked for, because its marks were lifted out of it."""

    def call(*operands: Any) -> list[Any]:
        return run(*operands)

    call.__name__ = APART
    return jax.jit(call)


def run_beside(
    eqn: Eqn,
    run: Callable[[list[Any], list[Any]], list[Any]],
    values: Sequence[Any],
    in_slots: Sequence[Any],
) -> list[Any]:
    """The results of a call whose cotangent goes to its own rule and to a program beside it.

    Args:
        eqn: The call.
        run: The program of the statistics, a function of the operands and of the slots of each.
        values: The operands of the call.
        in_slots: The slots of each operand.
    """
    primals, tangents = operands_of(eqn)
    # Values are found by variable, because an operand that is passed twice has one slot and one
    # cotangent.
    at = of_variables(eqn, values)
    outs = call_of(eqn)(*[at[v] for v in primals])
    if is_rule(eqn):
        slots = of_variables(eqn, in_slots)
        # The rule is linear in its tangents, so its derivative at tangents of zero has every
        # layer's cotangent.
        operands = [at[v] for v in primals] + [jnp.zeros_like(at[v]) for v in tangents]
        operand_slots = [{}] * len(primals) + [slots[v] for v in tangents]
    else:
        operands, operand_slots = list(values), list(in_slots)
    # The operands are stopped, because they get their gradient from the call's own rule; here only
    # slots get one.
    beside = run([jax.lax.stop_gradient(x) for x in operands], operand_slots)
    if not is_rule(eqn):
        beside = [x for x, d in zip(beside, _floats(eqn.outvars), strict=True) if d]
    cotangent_twins = iter(beside)
    return [
        _same_cotangent(x, next(cotangent_twins)) if d else x
        for x, d in zip(outs, _floats(eqn.outvars), strict=True)
    ]


@jax.custom_vjp
def _same_cotangent(x: Array, beside: Array) -> Array:
    """``x``; the cotangent of the result goes to ``x`` and to ``beside``."""
    return x


_same_cotangent.defvjp(lambda x, beside: (x, None), lambda _, cotangent: (cotangent, cotangent))


# ---------------- results that are the rule's
#
# A derivative runs the rule in the place of the function, so under ``jax.value_and_grad`` the rule
# may return other shapes and dtypes. A jaxpr has the function's results, and JAX compares the
# rule's with them and raises, as it does inside ``jit``, ``remat`` and ``scan``.


def jaxpr_of(
    fn: Callable[..., ArrayTree], params: ArrayTree, *args: ArrayTree
) -> tuple[ClosedJaxpr, ArrayTree]:
    """The jaxpr of ``fn(params, *args)``, as a derivative in ``params`` has it, and result shapes.

    If a rule outside every ``jit``, ``remat`` and loop returns other types than its function does,
    all of ``fn`` becomes one function with a custom derivative, whose results and rule are those of
    ``jax.jvp`` of ``fn``; or of ``jax.vjp``, if only rules of a ``custom_vjp`` do so.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(params, *args)
    refused = _refused(closed.jaxpr, closed.jaxpr.invars[: len(jax.tree.leaves(params))])
    if not refused:
        return closed, shapes
    with_rules = _by_jvp if any(map(is_rule, refused)) else _by_vjp

    def again(params: ArrayTree, *args: ArrayTree) -> ArrayTree:
        free, others = partition(params)

        def of_leaves(free: dict[str, Array], others: dict[str, Any], args: Any) -> ArrayTree:
            return fn(with_leaves(params, free | others), *args)

        return with_rules(of_leaves)(free, others, args)

    try:
        return jax.make_jaxpr(again, return_shape=True)(params, *args)
    except Exception:  # JAX does not differentiate it either, and the analysis quotes its message
        return closed, shapes


def _refused(jaxpr: Jaxpr, parameters: Sequence[Var]) -> list[Eqn]:
    """The calls whose rules a derivative in the parameters runs, and JAX refuses in a jaxpr."""
    moving, refused = set(parameters), []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "stop_gradient":
            continue
        if any(is_var(v) and v in moving for v in eqn.invars):
            moving.update(v for v in eqn.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact))
            if is_refused(eqn):
                refused.append(eqn)
    return refused


def is_refused(eqn: Eqn) -> bool:
    """Whether JAX refuses a custom derivative's rule in a jaxpr, or it has other weak types."""
    if call_kind(eqn) != "custom" or is_function(eqn):
        return False
    primals, tangents = operands_of(eqn)

    def results(values: list[Array]) -> list[Array]:
        run, diff = _run_with(eqn, values, tangents)
        return (jax.jvp(run, (diff,), (diff,)) if is_rule(eqn) else jax.vjp(run, diff))[0]

    try:
        types = jax.eval_shape(results, shapes_of(primals))
    except Exception:
        return True
    return any(t.weak_type != v.aval.weak_type for t, v in zip(types, eqn.outvars, strict=True))


def _by_jvp(fn: Callable[..., ArrayTree]) -> Callable[..., ArrayTree]:
    """A function with ``jax.jvp`` of ``fn``, in its first argument, for results and rule."""

    @jax.custom_jvp
    def call(free: dict[str, Array], *others: Any) -> ArrayTree:
        zeros = jax.tree.map(jnp.zeros_like, free)
        return jax.jvp(lambda free: fn(free, *others), (free,), (zeros,))[0]

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> ArrayTree:
        free, *others = primals
        return jax.jvp(lambda free: fn(free, *others), (free,), tangents[:1])

    return call


def _by_vjp(fn: Callable[..., ArrayTree]) -> Callable[..., ArrayTree]:
    """A function with ``jax.vjp`` of ``fn``, in its first argument, for results and rule."""

    def forward(free: dict[str, Array], *others: Any) -> tuple[ArrayTree, Any]:
        return jax.vjp(lambda free: fn(free, *others), free)

    @jax.custom_vjp
    def call(free: dict[str, Array], others: Any, args: Any) -> ArrayTree:
        return forward(free, others, args)[0]

    call.defvjp(forward, lambda vjp, cotangents: (*vjp(cotangents), None, None))
    return call
