"""A program re-emitted with the body of each outermost scan under ``jax.checkpoint``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jaxkfac.interception import body_of, call_kind, evaluate, is_var, scan_counts, scan_like


def remat_scans(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with its scans rematted: the backward pass of one iteration computes it again.

    Scans whose body holds a checkpoint already, and scans inside other control flow than
    ``jit``, are left as they are.
    """

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        out = _run(closed.jaxpr, closed.consts, leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def scans_to_remat(fn: Callable[..., Any], *shapes: Any) -> int:
    """How many scans :func:`remat_scans` would change; nothing is computed."""
    return _count(jax.make_jaxpr(fn)(*shapes).jaxpr)


def _is_plain(eqn: Any) -> bool:
    if call_kind(eqn) != "scan":
        return False
    body, _ = body_of(eqn)
    return all(call_kind(inner) != "checkpoint" for inner in body.eqns)


def _count(jaxpr: Any) -> int:
    inner = (body_of(e)[0] for e in jaxpr.eqns if call_kind(e) == "jit")
    return sum(map(_is_plain, jaxpr.eqns)) + sum(map(_count, inner))


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return known[atom] if is_var(atom) else atom.val

    used = {x for eqn in jaxpr.eqns for x in eqn.invars if is_var(x)}
    used.update(x for x in jaxpr.outvars if is_var(x))
    for eqn in jaxpr.eqns:
        outvars = eqn.outvars
        if _is_plain(eqn):
            out = _rematted(eqn, [read(x) for x in eqn.invars])
        elif call_kind(eqn) == "jit" and _count(body_of(eqn)[0]):
            out = _run(*body_of(eqn), [read(x) for x in eqn.invars])
        else:
            needed = list(dict.fromkeys(x for x in eqn.invars if is_var(x)))
            outvars = [x for x in eqn.outvars if x in used]
            out = evaluate([eqn], needed, outvars, jaxpr)(*(read(x) for x in needed))
        known.update(zip(outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _rematted(eqn: Any, operands: list[Any]) -> list[Any]:
    """A scan equation with its body under a checkpoint."""
    num_consts, num_carry = scan_counts(eqn)
    consts, rest = operands[:num_consts], operands[num_consts:]
    body = jex.jaxpr_as_fun(jex.ClosedJaxpr(*body_of(eqn)))

    # Between two iterations nothing can be shared, so that preventing it would only cost.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *xs)
        return list(out[:num_carry]), list(out[num_carry:])

    carry, ys = scan_like(eqn, step, rest[:num_carry], rest[num_carry:])
    return [*carry, *ys]
