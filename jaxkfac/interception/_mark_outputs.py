"""Outputs that a loss names itself: ``mark_outputs``, and a program that returns them.

A mark is a primitive, an identity that carries its likelihood into the jaxpr. Differentiation
leaves it on the primal value alone, so ``jax.grad`` inside the loss does not change marks.

A loss may have a custom derivative (``custom_jvp``), with its mark in the function or in the rule.
The program that holds the mark is then run beside the call, for its outputs alone, while the call
gives value and gradient. In a ``custom_vjp`` a mark is refused, and in its rule it is not seen.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Shaped

from jaxkfac._errors import HiddenMarkError
from jaxkfac._interpreter import Replacer, run_in_place
from jaxkfac._jaxpr_compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    body_of,
    call_kind,
    cast_varying,
    is_var,
    jaxprs_in,
    of_operands,
    results_of,
)
from jaxkfac.interception._custom import (
    is_refused,
    is_rule,
    of_variables,
    opaque_call,
    operands_of,
    rule_of,
    shapes_of,
)
from jaxkfac.interception._functions import is_function

MARK_OUTPUTS = "jaxkfac_mark_outputs"
_primitive = Primitive(MARK_OUTPUTS)


def mark_outputs(
    x: Shaped[Array, "..."],
    likelihood: Any,
    weight: float | Shaped[Array, "..."] = 1.0,
    mask: Shaped[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    r"""Declare, inside a scalar loss, what its outputs are. An identity.

    The mark states: *the loss contains* ``weight`` *times the mean, over the* $T$ *unmasked terms
    of* ``x``, *of* $-\log p(\text{target} \mid x)$. The targets remain with the loss. With its
    marks a scalar loss has every Fisher type, sharing and mask that an ``Objective`` has. Several
    marks add up, each with its weight and its own $T$.

    Args:
        x: Outputs, ``(examples, ..., c)`` with one term's outputs last; for ``jk.Bernoulli()`` and
            ``jk.Gaussian()`` also ``(examples,)``, one number for each term. Under ``jax.vmap``
            the mapped axis becomes the first axis, whose rows are terms like any other.
        likelihood: ``jk.Categorical()``, ``jk.Bernoulli()`` or ``jk.Gaussian()``, or an object
            with their methods. For a squared error without the half, pass ``weight=2.0``.
        weight: Factor of the mean in the loss, a positive number, or a scalar array that is not
            negative; a mark with weight zero contributes to no factor.
        mask: ``(examples, ...)``: bool, True for the terms that count; or floating weights of
            terms, not negative. The mean is then $\sum w l / \sum w$ with $T = \sum w$, and a term
            enters the Fisher with $\sqrt w$ times its gradient. ``None`` for all.

    Returns:
        ``x``, unchanged.

    Raises:
        TypeError: ``x`` is no array, or ``weight`` no number.
        ValueError: ``x`` has no floating dtype, ``mask`` is no bool or floating array of the terms'
            shape or has a weight that is negative or not finite, ``weight`` is not positive, or
            ``ignore_index`` or ``class_weights`` is given without a mask. Inside ``jit`` such a
            weight makes the factors NaN.
        HiddenMarkError: later, when factors are collected: the mark is inside a ``scan``,
            ``cond``, ``while``, ``shard_map`` or ``custom_vjp``, where its terms cannot be read.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> def loss(params, batch):
        ...     x, y = batch
        ...     error = jk.mark_outputs(x @ params["w"], jk.Gaussian()) - y
        ...     return 0.5 * jnp.square(error).sum(-1).mean()
        >>> stats = jk.value_grad_and_factors(loss, fisher="exact")
        >>> batch = jnp.eye(4), jnp.zeros((4, 2))
        >>> value, grads, factors = stats({"w": jnp.ones((4, 2))}, batch)
        >>> print(factors["w"].g)
        [[1. 0.]
         [0. 1.]]
    """
    check_likelihood("mark_outputs: likelihood", likelihood)
    for name in ("ignore_index", "class_weights"):
        if mask is None and getattr(likelihood, name, None) is not None:
            raise ValueError(
                f"mark_outputs: {name}= of {type(likelihood).__name__} is about targets, which a "
                "mark does not see: give mask=likelihood.kept(targets)"
            )
    # A weight that is a number becomes a parameter of the equation, so that factors know it when
    # they are traced; only an array is an operand.
    x, weight = checked_outputs(x), checked_weight(weight)
    one = getattr(likelihood, "one_output", False)
    if mask is not None:
        shapes = [x.shape[:-1], x.shape] if one and x.ndim < 2 else [x.shape[:-1]]
        _check_mask(mask, shapes)
    if x.ndim == 0 and not one:
        raise ValueError(
            f"mark_outputs: x is a scalar, expected the outputs of {type(likelihood).__name__} on "
            "its last axis"
        )
    operands = [x, *([] if isinstance(weight, float) else [weight])]
    operands += [] if mask is None else [jnp.asarray(mask)]
    # A primitive and not a `custom_vjp`, which differentiation replaces by its rules: a mark must
    # survive `jvp`, `vmap` and the rewriting of jaxprs with its likelihood.
    return _primitive.bind(
        *operands,
        likelihood=likelihood,
        weight=weight if isinstance(weight, float) else None,
        masked=mask is not None,
    )


def _check_mask(mask: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse what is neither a mask nor weights of terms, and weights that are no weights."""
    has_dtype = hasattr(mask, "dtype")
    fits = has_dtype and (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating))
    if not fits or mask.shape not in shapes:
        actual = f"{mask.dtype} of shape {mask.shape}" if has_dtype else mask
        raise ValueError(
            f"mark_outputs: mask is {actual}, expected bool, or floating weights, with one entry "
            f"per term, {shapes[-1]}"
        )
    check_weights("mark_outputs: mask", mask)


def check_weights(what: str, mask: Any) -> None:
    """Refuse weights of terms that are negative or not finite, where they have values.

    Raises:
        ValueError: naming the first such weight.
    """
    if mask.dtype == jnp.bool_ or isinstance(mask, Tracer | jax.ShapeDtypeStruct):
        return
    weights = np.asarray(mask, np.float64)
    if (bad := ~(np.isfinite(weights) & (weights >= 0))).any():
        at = tuple(map(int, np.argwhere(bad)[0]))
        raise ValueError(
            f"{what} has the weight {weights[at]:g} at {list(at)}, expected a finite number that "
            "is not negative"
        )


def checked_outputs(x: Any) -> Any:
    """Check an array of outputs."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"mark_outputs: x: expected an array, got {type(x).__name__}")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"mark_outputs: x has dtype {x.dtype}, expected outputs that are floating")
    return x


def checked_weight(weight: Any) -> Any:
    """Check a weight and return it as a float or a scalar array."""
    if isinstance(weight, bool) or not (
        isinstance(weight, int | float) or hasattr(weight, "shape")
    ):
        raise TypeError(
            f"mark_outputs: weight={weight!r}, expected a positive number or a scalar array"
        )
    if isinstance(weight, int | float):
        if not weight > 0:
            raise ValueError(f"mark_outputs: weight={weight}, expected a positive number")
        return float(weight)
    if weight.shape != ():
        raise ValueError(f"mark_outputs: weight has shape {weight.shape}, expected a scalar")
    if not isinstance(weight, Tracer) and np.asarray(weight) < 0:
        raise ValueError(f"mark_outputs: weight={weight}, expected a number that is not negative")
    return weight


def check_likelihood(what: str, likelihood: object) -> None:
    """Refuse an object without the four methods of a likelihood; nothing else is required."""
    if isinstance(likelihood, type):
        raise TypeError(f"{what}: expected an instance, write jk.{likelihood.__name__}()")
    if not all(hasattr(likelihood, m) for m in ("check", "terms", "sample", "fisher_column")):
        raise TypeError(
            f"{what}: expected jk.Categorical(), jk.Bernoulli(), jk.Gaussian(), or an "
            "object with their methods check, terms, sample and fisher_column, got "
            f"{likelihood!r}"
        )


_primitive.def_impl(lambda x, *_, **__: x)
_primitive.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(_primitive, lambda ctx, x, *_, **__: [x])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    # The tangent passes unmarked: a mark states what the outputs are, and tangents are no outputs.
    return _primitive.bind(*primals, **params), tangents[0]


def _batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    x, axis = operands[0], axes[0]
    # A mark has one scalar weight and one number of terms. A mapped weight or mask would give each
    # call its own, even where all calls share the outputs.
    if any(a is not None for a in axes[1:]):
        raise HiddenMarkError(
            "jk.mark_outputs: its mask or weight is mapped by jax.vmap, and the mean over calls of "
            "each call's mean is not the mean over all terms; mark the outputs after vmap, with "
            "the whole mask"
        )
    if params["masked"]:
        # The mask is the last operand and has no mapped axis here, so all calls have the same mask;
        # the mark gets one for all terms.
        rows = operands[-1]
        operands = (*operands[:-1], jnp.broadcast_to(rows, (x.shape[axis], *rows.shape)))
    return _primitive.bind(jnp.moveaxis(x, axis, 0), *operands[1:], **params), 0


ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch


class OutputMark(NamedTuple):
    """A mark of a program.

    Attributes:
        likelihood: Its likelihood.
        shape: Shape and dtype of the marked outputs.
        weight: A number; ``None`` if it is an array.
        masked: Whether it has a mask.
        type: Type of the marked outputs, with the mesh axes over which they differ.
        beside: Whether it is in a function with a custom derivative, or in the rule of one: the
            loss then sends no cotangent to it.
    """

    likelihood: Any
    shape: jax.ShapeDtypeStruct
    weight: float | None
    masked: bool
    type: Any
    beside: bool = False

    def zeros(self) -> Float[Array, "..."]:
        """Zeros of its shape, which inside ``shard_map`` differ over the same mesh axes."""
        return cast_varying(jnp.zeros(self.shape.shape, self.shape.dtype), self.type)


class Marked(NamedTuple):
    """The results of a program with marks.

    Attributes:
        outputs: The marked outputs of each mark.
        result: The results of the program itself, as leaves.
        weights: Weights that are arrays, by mark.
        masks: Masks, by mark.
    """

    outputs: list[Any]
    result: list[Any]
    weights: dict[int, Any]
    masks: dict[int, Any]


def marks_of(jaxpr: Jaxpr, *, rules: bool = True) -> list[OutputMark]:
    """The marks of a program, in order.

    Args:
        jaxpr: The program.
        rules: Whether to include those in the rule of a ``custom_jvp``.

    Raises:
        HiddenMarkError: a mark is where its terms cannot be read.
        ValueError: two marks are of one value.
    """
    marks, marked = [], {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is _primitive:
            if is_var(eqn.invars[0]) and eqn.invars[0] in marked:
                raise ValueError(
                    f"jk.mark_outputs: mark {len(marks)} is of what mark {marked[eqn.invars[0]]} "
                    "marks already, and the loss would hold both means: leave one out, or mark the "
                    "same value twice, not its mark"
                )
            # A mark is known by its result and not by its operand: marking one value twice is two
            # means of one value and allowed, while a mark of a mark counts its terms twice.
            marked[eqn.outvars[0]] = len(marks)
        marks += _marks_in(eqn, rules=rules)
    return marks


def _marks_in(eqn: Eqn, *, rules: bool) -> list[OutputMark]:
    """The marks of an equation, and of the programs in it."""
    if eqn.primitive is _primitive:
        aval, p = eqn.outvars[0].aval, eqn.params
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return [OutputMark(p["likelihood"], shape, p["weight"], p["masked"], aval)]
    if is_rule(eqn):
        beside = _beside(eqn, rules=rules)
        inner = marks_of(beside.jaxpr, rules=False) if beside else []
        return [mark._replace(beside=True) for mark in inner]
    inner = [m for body in jaxprs_in(eqn) for m in marks_of(body, rules=rules)]
    # Only these two run their body once, so that outputs, mask and weight can be returned from it.
    if inner and call_kind(eqn) not in ("jit", "checkpoint"):
        raise HiddenMarkError(
            f"jk.mark_outputs stands inside `{eqn.primitive.name}`, where its terms cannot be "
            "read: return these outputs from it, and mark them outside"
        )
    return inner


def lifted(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], shifts: Sequence[Any]
) -> Marked:
    """Run a program so that it returns the outputs that it marks.

    Args:
        jaxpr: The program.
        consts: Its constants.
        args: Its arguments.
        shifts: For each mark, zeros of its shape; their cotangents are those that the loss sends
            to the marked outputs. ``None`` if these cotangents are not needed: a shift has a rule
            for reverse mode alone, and a solver that stores the full program could not run it
            forward.
    """
    result, marks = _lifted(jaxpr, consts, args, shifts, rules=True)
    weights = {k: w for k, (_, w, _) in enumerate(marks) if w is not None}
    masks = {k: m for k, (_, _, m) in enumerate(marks) if m is not None}
    return Marked([x for x, _, _ in marks], result, weights, masks)


_Ends = tuple[Any, Any, Any]  # outputs, weight and mask of a mark


def _lifted(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], shifts: Sequence[Any], *, rules: bool
) -> tuple[list[Any], list[_Ends]]:
    """The results of a program, and its marks."""
    lifting = _Lifting(shifts, rules=rules)
    return lifting.run(jaxpr, consts, args), lifting.marks


class _Lifting(Replacer):
    """Emits a program, with the values that it marks in ``marks``, in the order of `marks_of`."""

    def __init__(self, shifts: Sequence[Any], *, rules: bool) -> None:
        self.shifts, self.rules = shifts, rules
        self.marks: list[_Ends] = []

    def touches(self, eqn: Eqn) -> bool:
        # A rule that is run beside its call calls functions that JAX does not differentiate there,
        # and whose own rules it would refuse; their operands are stopped.
        refused = not self.rules and is_refused(eqn)
        return refused or bool(_marks_in(eqn, rules=self.rules))

    def replaced(self, eqn: Eqn, values: list[Any]) -> list[Any]:
        number = len(_marks_in(eqn, rules=self.rules))
        shifts = self.shifts[len(self.marks) : len(self.marks) + number]
        if eqn.primitive is _primitive:
            further = values[1:]
            mask = further.pop() if eqn.params["masked"] else None
            self.marks.append((values[0], further[0] if further else None, mask))
            return [values[0] if shifts[0] is None else _shifted(values[0], shifts[0])]
        if not number:
            return results_of(eqn, jax.lax.stop_gradient(values))
        if is_rule(eqn):
            self.marks += _run_beside(eqn, values, shifts, rules=self.rules)
            # The call itself runs unchanged, with its custom derivative. Its marks come from a
            # second run of its function; nobody reads the results of that run, so the compiler
            # drops what no mark needs.
            return opaque_call(of_operands(eqn))(*values)
        inner = functools.partial(_lifted, *body_of(eqn), rules=self.rules)
        out, marks = run_in_place(eqn, inner, [values, shifts])
        self.marks += marks
        return out


def _beside(eqn: Eqn, *, rules: bool) -> ClosedJaxpr | None:
    """The program of a ``custom_jvp`` that holds its marks: the function, or else its rule.

    Its operands are those of the rule: the variables that the call reads, and their tangents. The
    rule of an elementwise function holds no marks.
    """
    primals, tangents = operands_of(eqn)
    if marks_of(body_of(eqn)[0], rules=False):

        def function(values: list[Any], _: list[Any]) -> list[Any]:
            at = dict(zip(primals, values, strict=True))
            operands = [at[v] if is_var(v) else v.val for v in eqn.invars]
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(*body_of(eqn)))(*operands)

        return jax.make_jaxpr(function)(shapes_of(primals), shapes_of(tangents))
    if not rules or is_function(eqn):
        return None
    try:
        rule = rule_of(eqn)
    except Exception:  # the rule refuses some tangent, and so shows no marks
        return None
    return rule if marks_of(rule.jaxpr, rules=False) else None


def _run_beside(
    eqn: Eqn, values: Sequence[Any], shifts: Sequence[Any], *, rules: bool
) -> list[_Ends]:
    """The marks of a function with a custom derivative, whose results nobody reads."""
    primals, tangents = operands_of(eqn)
    at = of_variables(eqn, values)
    beside = _beside(eqn, rules=rules)
    assert beside is not None
    operands = [at[v] for v in primals] + [jnp.zeros_like(at[v]) for v in tangents]
    return _lifted(beside.jaxpr, beside.consts, operands, shifts, rules=False)[1]


@jax.custom_vjp
def _shifted(x: Any, shift: Any) -> Any:
    """``x``, whose cotangent also goes to ``shift``; a sum would merge the axes of the two."""
    return x


_shifted.defvjp(lambda x, shift: (x, None), lambda _, cotangent: (cotangent, cotangent))
