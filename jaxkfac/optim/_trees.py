"""Operations on trees of gradients, and the steps of one update."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxkfac._arguments import ArrayTree, check_arrays, is_differentiable, leaves_by_path, path_of
from jaxkfac._errors import instance_of, named, nearest, scalar
from jaxkfac.curvature.operators import Operator
from jaxkfac.linalg import inner_product, is_all_finite
from jaxkfac.optim._schedules import may_be_positive

# ---------------- trees of gradients


def all_finite(*trees: ArrayTree) -> Bool[Array, ""]:
    """Whether every inexact element of the trees is finite."""
    return is_all_finite(*(x for x in jax.tree.leaves(trees) if is_differentiable(x)))


def gradients_only(tree: ArrayTree) -> ArrayTree:
    """``tree`` without the leaves that are not gradients (integers, keys, float0)."""
    return jax.tree.map(lambda x: x if is_differentiable(x) else optax.MaskedNode(), tree)


def cast_like(grads: ArrayTree, updates: ArrayTree) -> ArrayTree:
    """``updates`` in the dtypes of ``grads``, without the leaves that are not gradients."""
    return jax.tree.map(
        lambda g, u: u.astype(g.dtype) if is_differentiable(g) else optax.MaskedNode(),
        grads,
        updates,
    )


def with_constants(grads: ArrayTree, updates: ArrayTree) -> ArrayTree:
    """``updates`` with the leaves that are not gradients put back unchanged."""
    return jax.tree.map(lambda g, u: g if isinstance(u, optax.MaskedNode) else u, grads, updates)


def scaled(factor: ArrayLike, leaf: Array) -> Array:
    """``factor * leaf`` in the dtype of ``leaf``."""
    return jnp.asarray(factor, leaf.dtype) * leaf


def sum_dtype(*trees: ArrayTree) -> Any:
    """float64 if any leaf is float64, else float32: sums never run in half precision."""
    dtypes = {jnp.dtype(x.dtype) for x in jax.tree.leaves(trees) if is_differentiable(x)}
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def covered_leaves(tree: ArrayTree, covered: Collection[str]) -> ArrayTree:
    """True on the leaves at the covered paths."""
    return jax.tree_util.tree_map_with_path(lambda p, _: path_of(p) in covered, tree)


def check_some_covered(what: str, tree: ArrayTree, covered: Collection[str], of: str) -> None:
    """Refuse parameters or gradients of another model than the factors or bases.

    ``optax.masked`` passes only some of them, so one match is enough.

    Raises:
        TypeError: a leaf is not an array.
        ValueError: no layer has its parameter among them.
    """
    check_arrays(what, tree)
    paths = leaves_by_path(tree)
    if covered and not any(path in paths for path in covered):
        first = next(iter(covered))
        raise ValueError(
            f"{what}: none of the layers of {of} is among them; the first is {first!r}, and the "
            f"nearest are {nearest(first, paths)}"
        )


def checked_state(
    what: str, state: Any, kind: type[Any], remedy: str = "as tx.init(params) gives it"
) -> Any:
    """The state; its fields as a list or tuple, as a file of ``np.savez`` returns them, are one.

    Raises:
        TypeError: another transformation made it.
    """
    state = _with_type(state, kind)
    instance_of(what, state, kind, remedy)
    return state


def _with_type(value: Any, kind: Any) -> Any:
    """A list or tuple as the ``NamedTuple`` of as many fields that it was, and they likewise."""
    fields = getattr(kind, "_fields", ())
    if type(value) not in (list, tuple) or not fields or len(value) != len(fields):
        return value
    kinds = [kind.__annotations__[name] for name in fields]
    return kind(*map(_with_type, value, kinds))


def states_of(state: Any, *kinds: type) -> list[Any]:
    """The states of some transformations in that of a chain of them."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [node for node in nodes if isinstance(node, kinds)]


def check_like_momentum(grads: ArrayTree, momentum: ArrayTree) -> None:
    """Refuse gradients that do not match the parameters for which the state was made."""
    by_path = leaves_by_path(grads)
    absent = [path for path in leaves_by_path(momentum) if path not in by_path]
    if absent:
        raise ValueError(
            f"grads: expected a tree like the parameters of tx.init, got {named(grads)}, which "
            f"lacks {absent[0]!r}; nnx.Optimizer wants grads = jk.as_state(grads, model)"
        )
    check_arrays("grads", grads)


def is_concrete(x: object) -> bool:
    """Whether ``x`` is an array with values: not traced, not a float0, not a Python number.

    It may be an array of NumPy, as a restored state has.
    """
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype != jax.dtypes.float0
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def required_factors(what: str, arguments: dict[str, Any]) -> Any:
    """Pop ``factors=`` from the keyword arguments of an update.

    Raises:
        TypeError: it was left out; the update would silently be plain gradient descent.
    """
    if "factors" not in arguments:
        raise TypeError(
            f"{what}: update needs factors=, as in value, grads, factors = stats(params, batch, "
            "key) and tx.update(grads, state, params, factors=factors); factors=None says that "
            "none come with this step"
        )
    return arguments.pop("factors")


def checked_value(value: object) -> Any:
    """Check ``value=`` of an update.

    Raises:
        TypeError: it is not a single number.
    """
    scalar("value", value, "the loss of this batch, a number")
    return value


# ---------------- the steps of a K-FAC update


def norm_scale(
    steps: ArrayTree, grads: ArrayTree, covered: Collection[str], rate: ArrayLike, limit: ArrayLike
) -> Float[Array, ""]:
    r"""The factor of at most 1 that makes $\eta^2 \langle p, \nabla \rangle$ at most ``limit``.

    Only leaves at the covered paths count.
    """
    step_leaves, grad_leaves = leaves_by_path(steps), leaves_by_path(grads)
    ours = [path for path in grad_leaves if path in covered]
    dtype = sum_dtype(steps, grads)
    product = inner_product(
        [step_leaves[path] for path in ours], [grad_leaves[path] for path in ours], dtype
    )
    squared = jnp.square(jnp.asarray(rate, dtype)) * product
    limit = jnp.asarray(limit, dtype)
    beyond = squared > limit  # False for NaN
    scale = jnp.where(beyond, jnp.sqrt(limit / jnp.where(beyond, squared, 1)), 1)
    # Above 1e19 in float32 the products overflow, with both signs to NaN. Such a step is not taken.
    return jnp.where(jnp.isnan(squared), 0, scale)


def scale_covered(factor: Array, steps: ArrayTree, covered: Collection[str]) -> ArrayTree:
    """The steps, scaled at the covered paths."""
    ours = covered_leaves(steps, covered)
    return jax.tree.map(lambda mine, p: scaled(factor, p) if mine else p, ours, steps)


def zero_momentum(params: ArrayTree, covered: Collection[str], *, everywhere: bool) -> ArrayTree:
    """Zeros like the parameters at the covered paths, or like all parameters with a gradient."""
    return jax.tree.map(
        lambda mine, x: (
            jnp.zeros_like(x)
            if (mine or everywhere) and is_differentiable(x)
            else optax.MaskedNode()
        ),
        covered_leaves(params, covered),
        params,
    )


def advance_momentum(decay: ArrayLike, momentum: ArrayTree, steps: ArrayTree) -> ArrayTree:
    r"""$m \leftarrow \mu m + p$ for leaves with a momentum, in its dtype."""
    return jax.tree.map(
        lambda p, m: m if isinstance(m, optax.MaskedNode) else scaled(decay, m) + p.astype(m.dtype),
        steps,
        momentum,
    )


def descend(
    momentum: ArrayTree,
    grads: ArrayTree,
    params: ArrayTree | None,
    rate: ArrayLike,
    weight_decay: ArrayLike,
) -> ArrayTree:
    r"""$-\eta (m + w \theta)$ for leaves with a momentum, and the gradient for all others.

    ``params`` may have more leaves than ``grads``: those without a gradient.
    """

    def decayed(x: Array, m: ArrayTree) -> Any:
        if isinstance(m, optax.MaskedNode):
            return m
        return m + scaled(weight_decay, x.astype(m.dtype))

    def step(g: Array, m: ArrayTree) -> Array:
        return g if isinstance(m, optax.MaskedNode) else -scaled(rate, m).astype(g.dtype)

    if may_be_positive(weight_decay):
        momentum = jax.tree.map(decayed, params, momentum)
    return jax.tree.map(step, grads, momentum)


def once_where(chosen: ArrayLike, function: Callable[[Any], Any], carry: ArrayTree) -> Any:
    """``function(carry)`` where it is chosen, else ``carry``.

    This is a loop of one iteration or none, because a loop updates its carry in place. If one
    branch of a ``cond`` reads what the other passes on, XLA makes two copies at every step, chosen
    or not: 1.7 GB for averages, inverses and gradients of a decoder with 12 blocks of 768
    (``benchmarks.accelerators``). ``function`` must take what it changes from its argument. A loop
    has no reverse-mode derivative, so the derivative of the ``cond`` is used.

    A select of every leaf would not do either: XLA would copy the reduction that ``chosen`` comes
    from into each select, and compile them for minutes (48 layers: 35 s of CPU against 10).
    """
    function, closed_over = jax.closure_convert(function, carry)

    @jax.custom_jvp
    def loop(chosen: ArrayLike, carry: ArrayTree, *closed_over: Any) -> Any:
        def body(state: tuple[Any, ...]) -> Any:
            again, carry = state
            return again & False, function(carry, *closed_over)

        return jax.lax.while_loop(lambda state: state[0], body, (chosen, carry))[1]

    def branches(chosen: ArrayLike, carry: ArrayTree, *closed_over: Any) -> Any:
        return jax.lax.cond(chosen, function, lambda carry, *_: carry, carry, *closed_over)

    loop.defjvp(functools.partial(jax.jvp, branches))
    return loop(chosen, carry, *closed_over)


def where(done: Bool[Array, ""], new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """``new`` if ``done``, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(done, x, y), new, old)


def zero_unless(done: Bool[Array, ""], tree: ArrayTree) -> ArrayTree:
    """``tree`` if ``done``, else zeros.

    The zero is not a constant for XLA. It would make one array of it, share that with the zeros
    that a scan's gradients begin with, and keep it from there: 267 MiB for a decoder with 12 blocks
    of 768 (``benchmarks.accelerators``).
    """
    return jax.tree.map(
        lambda x: jnp.where(done, x, jax.lax.optimization_barrier(jnp.zeros((), x.dtype))), tree
    )


# ---------------- explicit sharding


def is_sharded(tree: Any) -> bool:
    """Whether the type of any array is sharded; automatic axes do not appear in types.

    Arguments of an update may have functions among their leaves, which stay as they are.
    """
    return any(any(spec) for x in jax.tree.leaves(tree) if (spec := _spec(x)) is not None)


def gathered(tree: Any) -> Any:
    """Replicate every array on every device.

    Otherwise each product of sharded arrays would have to state the sharding of its result. XLA
    gathers an array where it is used, and frees it afterwards.
    """
    return jax.tree.map(
        lambda x: x if not any(_spec(x) or ()) else jax.sharding.reshard(x, PartitionSpec()), tree
    )


def sharded_like(tree: ArrayTree, like: ArrayTree) -> ArrayTree:
    """Shard the arrays of ``tree`` like those of ``like``."""

    def sharded(x: Any, like: object) -> Any:
        spec = _spec(like)
        return x if not any(spec or ()) else jax.sharding.reshard(x, spec)

    return jax.tree.map(sharded, tree, like)


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredOperator(Operator):
    """An operator whose vectors and products are replicated on every device.

    Attributes:
        operator: The operator of sharded parameters.
        params: These parameters; the operator's vectors need their shardings.
    """

    operator: Operator
    params: ArrayTree

    @property
    def like(self) -> ArrayTree:
        return self.operator.like

    @property
    def loss_terms(self) -> Any:
        return self.operator.loss_terms

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        return gathered(self.operator.product(self._sharded(leaves)))

    def forms(self, vectors: Sequence[dict[str, Array]]) -> Float[Array, "k k"]:
        return gathered(self.operator.forms([self._sharded(vector) for vector in vectors]))

    def _sharded(self, leaves: dict[str, Array]) -> dict[str, Array]:
        param_leaves = leaves_by_path(self.params)
        return {path: sharded_like(x, param_leaves.get(path)) for path, x in leaves.items()}


def on_mesh_of(like: ArrayTree, tree: ArrayTree) -> ArrayTree:
    """Put ``tree`` on the explicit mesh of ``like``, if it has one, like the result of a step.

    Arrays that are not sharded are replicated. Results of a step have a spec with an entry for
    each axis, and ``jit`` distinguishes ``P()`` from ``P(None, None)``. So with zeros like
    parameters that were placed with ``P()``, or made off the mesh, it would compile the step twice.
    """
    arrays = [x for x in jax.tree.leaves(like) if isinstance(x, Array)]
    placed = next((x for x in arrays if jax.typeof(x).sharding.mesh.explicit_axes), None)
    if placed is None or isinstance(placed, Tracer):
        return tree
    sharding: Any = placed.sharding

    def put(x: object) -> Any:
        if not isinstance(x, Array):
            return x
        spec = _spec(x) or ()
        full = PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
        return jax.device_put(x, NamedSharding(sharding.mesh, full))

    return jax.tree.map(put, tree)


def _spec(x: object) -> PartitionSpec | None:
    if not isinstance(x, Array) or jax.typeof(x).sharding.mesh.empty:
        return None
    return jax.typeof(x).sharding.spec
