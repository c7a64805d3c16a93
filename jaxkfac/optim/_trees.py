"""Trees of gradients: finiteness, choice, sharding, and the steps of one update."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from jaxkfac._errors import instance_of, named, nearest, scalar
from jaxkfac.curvature.operators import Operator
from jaxkfac.interception import check_arrays, is_differentiable, leaves_by_path, path_of
from jaxkfac.linalg import inner_product, is_all_finite
from jaxkfac.optim._schedules import may_be_positive

# ---------------- trees of gradients: finiteness, choice, and what factors cover


PyTree = Any


def all_finite(*trees: PyTree) -> Bool[Array, ""]:
    """Whether every inexact element of the trees is finite."""
    return is_all_finite(*(x for x in jax.tree.leaves(trees) if is_differentiable(x)))


def gradients_only(tree: PyTree) -> PyTree:
    """``tree`` with the leaves that are no gradients (integers, keys, float0) taken out."""
    return jax.tree.map(lambda x: x if is_differentiable(x) else optax.MaskedNode(), tree)


def cast_like(grads: PyTree, updates: PyTree) -> PyTree:
    """``updates`` in the dtypes of ``grads``, without the leaves that are no gradients."""
    return jax.tree.map(
        lambda g, u: u.astype(g.dtype) if is_differentiable(g) else optax.MaskedNode(),
        grads,
        updates,
    )


def with_constants(grads: PyTree, updates: PyTree) -> PyTree:
    """``updates`` with the leaves that are no gradients put back, as they came."""
    return jax.tree.map(lambda g, u: g if isinstance(u, optax.MaskedNode) else u, grads, updates)


def scaled(factor: ArrayLike, leaf: Array) -> Array:
    """``factor * leaf`` in the dtype of ``leaf``."""
    return jnp.asarray(factor, leaf.dtype) * leaf


def sum_dtype(*trees: PyTree) -> Any:
    """float64 if any leaf is, else float32: sums never run in half precision."""
    dtypes = {jnp.dtype(x.dtype) for x in jax.tree.leaves(trees) if is_differentiable(x)}
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def covered_leaves(tree: PyTree, covered: Collection[str]) -> PyTree:
    """True on the leaves at the covered paths."""
    return jax.tree_util.tree_map_with_path(lambda p, _: path_of(p) in covered, tree)


def check_some_covered(what: str, tree: PyTree, covered: Collection[str], of: str) -> None:
    """Refuse parameters or gradients of another model than the factors or bases.

    ``optax.masked`` hands over some of them, so some are enough.

    Raises:
        TypeError: a leaf is no array.
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


def check_state(what: str, state: Any, kind: type) -> None:
    """Refuse a state that another transformation made."""
    instance_of(f"{what}: the state", state, kind, "as tx.init(params) gives it")


def check_like_momentum(grads: PyTree, momentum: PyTree) -> None:
    """Refuse gradients that are not like the parameters that the state was made for."""
    own = leaves_by_path(grads)
    absent = [path for path in leaves_by_path(momentum) if path not in own]
    if absent:
        raise ValueError(
            f"grads: expected a tree like the parameters of tx.init, got {named(grads)}, which "
            f"lacks {absent[0]!r}; nnx.Optimizer wants grads = jk.as_state(grads, model)"
        )
    check_arrays("grads", grads)


def is_concrete(x: Any) -> bool:
    """Whether ``x`` is an array with values: not traced, not a float0, not a number of Python's."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def required_factors(what: str, given: dict[str, Any]) -> Any:
    """``factors=`` of an update, taken out of its keyword arguments.

    Raises:
        TypeError: it was left out, which would be plain gradient descent without a word.
    """
    if "factors" not in given:
        raise TypeError(
            f"{what}: update needs factors=, as in value, grads, factors = stats(params, batch, "
            "key) and tx.update(grads, state, params, factors=factors); factors=None says that "
            "none come with this step"
        )
    return given.pop("factors")


def checked_value(value: Any) -> Any:
    """``value=`` of an update.

    Raises:
        TypeError: it is not one number.
    """
    scalar("value", value, "the loss of this batch, a number")
    return value


# ---------------- the steps of one K-FAC update, each on its own


def norm_scale(
    steps: PyTree, grads: PyTree, covered: Collection[str], rate: ArrayLike, limit: ArrayLike
) -> Float[Array, ""]:
    r"""The factor at most 1 by which $\eta^2 \langle p, \nabla \rangle$ is at most ``limit``.

    Only the leaves at the covered paths count.
    """
    taken, given = leaves_by_path(steps), leaves_by_path(grads)
    ours = [path for path in given if path in covered]
    dtype = sum_dtype(steps, grads)
    product = inner_product([taken[path] for path in ours], [given[path] for path in ours], dtype)
    squared = jnp.square(jnp.asarray(rate, dtype)) * product
    limit = jnp.asarray(limit, dtype)
    beyond = squared > limit  # of NaN it is not
    return jnp.where(beyond, jnp.sqrt(limit / jnp.where(beyond, squared, 1)), 1)


def scale_covered(factor: Array, steps: PyTree, covered: Collection[str]) -> PyTree:
    """The steps, scaled at the covered paths."""
    ours = covered_leaves(steps, covered)
    return jax.tree.map(lambda mine, p: scaled(factor, p) if mine else p, ours, steps)


def zero_momentum(params: PyTree, covered: Collection[str], *, everywhere: bool) -> PyTree:
    """Zeros like the parameters at the covered paths, or like all that have a gradient."""
    return jax.tree.map(
        lambda mine, x: (
            jnp.zeros_like(x)
            if (mine or everywhere) and is_differentiable(x)
            else optax.MaskedNode()
        ),
        covered_leaves(params, covered),
        params,
    )


def advance_momentum(decay: ArrayLike, momentum: PyTree, steps: PyTree) -> PyTree:
    r"""$m \leftarrow \mu m + p$ where there is a momentum, in its dtype."""
    return jax.tree.map(
        lambda p, m: m if isinstance(m, optax.MaskedNode) else scaled(decay, m) + p.astype(m.dtype),
        steps,
        momentum,
    )


def descend(
    momentum: PyTree, grads: PyTree, params: PyTree | None, rate: ArrayLike, weight_decay: ArrayLike
) -> PyTree:
    r"""$-\eta (m + w \theta)$ where there is a momentum, the gradient elsewhere.

    ``params`` may have more leaves than ``grads``: those without a gradient.
    """

    def decayed(x: Array, m: Any) -> Any:
        if isinstance(m, optax.MaskedNode):
            return m
        return m + scaled(weight_decay, x.astype(m.dtype))

    def step(g: Array, m: Any) -> Array:
        return g if isinstance(m, optax.MaskedNode) else -scaled(rate, m).astype(g.dtype)

    if may_be_positive(weight_decay):
        momentum = jax.tree.map(decayed, params, momentum)
    return jax.tree.map(step, grads, momentum)


def taken_where(
    finite: Bool[Array, ""],
    burning: Bool[Array, ""] | None,
    step: Callable[[], Any],
    skip: Callable[[], Any],
    average_alone: Callable[[], Any],
) -> Any:
    """``step()`` where what came is finite, else ``skip()``; ``average_alone()`` in a burn-in.

    By a cond, not a select of every leaf: XLA copies the reduction over all leaves into each
    select, and compiles them for minutes (48 layers: 35 s of CPU against 10).
    """
    if burning is None:
        return jax.lax.cond(finite, step, skip)
    branch = jnp.where(finite, jnp.where(burning, 2, 1), 0)
    return jax.lax.switch(branch, [skip, step, average_alone])


def where(done: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """``new`` if ``done``, else ``old``, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(done, x, y), new, old)


# ---------------- arrays sharded over explicit mesh axes: gathered for the arithmetic, sharded
# again after


def is_sharded(tree: PyTree) -> bool:
    """Whether the type of any array says that it is sharded; over automatic axes none does."""
    return any(any(spec) for x in jax.tree.leaves(tree) if (spec := _spec(x)) is not None)


def whole(tree: PyTree) -> PyTree:
    """Every array on every device.

    Products of sharded arrays would each have to say how their results are. XLA gathers an array
    where it is used, and frees it after.
    """
    return jax.tree.map(
        lambda x: x if not any(_spec(x) or ()) else jax.sharding.reshard(x, PartitionSpec()), tree
    )


def sharded_like(tree: PyTree, like: PyTree) -> PyTree:
    """The arrays of ``tree`` sharded as those of ``like``."""

    def sharded(x: Any, like: Any) -> Any:
        spec = _spec(like)
        return x if not any(spec or ()) else jax.sharding.reshard(x, spec)

    return jax.tree.map(sharded, tree, like)


@dataclasses.dataclass(frozen=True, eq=False)
class GatheredOperator(Operator):
    """An operator whose vectors and products are whole on every device.

    Attributes:
        operator: Of sharded parameters.
        params: These, whose shardings its vectors must have.
    """

    operator: Operator
    params: PyTree

    @property
    def like(self) -> PyTree:
        return self.operator.like

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        return whole(self.operator.product(self._sharded(leaves)))

    def forms(self, vectors: Sequence[dict[str, Array]]) -> Float[Array, "k k"]:
        return whole(self.operator.forms([self._sharded(vector) for vector in vectors]))

    def _sharded(self, leaves: dict[str, Array]) -> dict[str, Array]:
        known = leaves_by_path(self.params)
        return {path: sharded_like(x, known.get(path)) for path, x in leaves.items()}


def on_mesh_of(like: PyTree, tree: PyTree) -> PyTree:
    """``tree`` on the explicit mesh that ``like`` lies on, if it does, as a step returns it.

    What is not sharded is whole on every device. Results of a step have a spec with an entry for
    each axis, and ``jit`` takes ``P()`` and ``P(None, None)`` for two: from zeros like parameters
    that were placed with ``P()``, or that were made off the mesh, it would compile the step twice.
    """
    arrays = [x for x in jax.tree.leaves(like) if isinstance(x, Array)]
    placed = next((x for x in arrays if jax.typeof(x).sharding.mesh.explicit_axes), None)
    if placed is None or isinstance(placed, Tracer):
        return tree
    sharding: Any = placed.sharding

    def put(x: Any) -> Any:
        if not isinstance(x, Array):
            return x
        spec = _spec(x) or ()
        full = PartitionSpec(*spec, *[None] * (x.ndim - len(spec)))
        return jax.device_put(x, NamedSharding(sharding.mesh, full))

    return jax.tree.map(put, tree)


def _spec(x: Any) -> PartitionSpec | None:
    if not isinstance(x, Array) or jax.typeof(x).sharding.mesh.empty:
        return None
    return jax.typeof(x).sharding.spec
