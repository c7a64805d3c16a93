"""The interface of operators: products, flat vectors, sums, scaling and damping."""

import abc
import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree, is_differentiable, partition, with_leaves
from jaxkfac._errors import installed_by, nearest
from jaxkfac.linalg import statistics_dtype

# ---------------- optional libraries


def load(module: str) -> ModuleType:
    """Import a module of the ``operators`` extra.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    with installed_by("operators"):
        return importlib.import_module(module)


# ---------------- matmul precision


def full_precision() -> Any:
    """A context in which float32 products have full precision on every device.

    The default is a bfloat16 pass on a TPU and TF32 on a GPU. That is fine for a model, but too
    coarse for the inner products of an algorithm that subtracts them.
    """
    return jax.default_matmul_precision("highest")


def as_outside(product: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its products keep the precision that is set now, at any call."""
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(product)
    def call(*args: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return product(*args)

    return call


# ---------------- operators on flat vectors, for outside libraries


class Flat(NamedTuple):
    """An operator on vectors ``(size,)``.

    Attributes:
        matvec: The product, ``(size,)`` to ``(size,)``.
        size: The dimension.
        dtype: float64 if any leaf is, else float32. bfloat16 leaves are converted only inside the
            product.
        unflatten: Maps a vector to a tree like ``operator.like``; leaves without a gradient
            become float0.
    """

    matvec: Callable[[Array], Array]
    size: int
    dtype: Any
    unflatten: Callable[[Array], Any]


def length(vector: Array) -> Array:
    """Euclidean length, scaled so that no square overflows or underflows."""
    largest = jnp.abs(vector).max()
    divisor = jnp.where(largest > 0, largest, jnp.ones_like(largest))
    return largest * jnp.linalg.norm(vector / divisor)


def wide_dtype(operator: "Operator") -> Any:
    """The dtype in which an operator's vectors are combined: at least float32."""
    return statistics_dtype(*(leaf.dtype for leaf in operator.leaves.values()))


def coarsest_rounding(operator: "Operator") -> float:
    """The rounding unit of the operator's coarsest dtype."""
    # One coarse leaf is enough to spoil the symmetry that a solver relies on, so the coarsest dtype
    # decides.
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in operator.leaves.values())


def flatten(operator: "Operator") -> Flat:
    """View an operator as a map of one long vector."""
    structs, dtype = operator.leaves, wide_dtype(operator)
    ends = np.cumsum([leaf.size for leaf in structs.values()]).tolist()

    def pieces(vector: Array) -> list[Array]:
        chunks = jnp.split(vector, ends[:-1])
        return [x.reshape(leaf.shape) for x, leaf in zip(chunks, structs.values(), strict=True)]

    def matvec(vector: Array) -> Array:
        out = operator.product(dict(zip(structs, pieces(vector), strict=True)))
        return jnp.concatenate([out[path].astype(dtype).ravel() for path in structs])

    def unflatten(vector: Array) -> Any:
        return as_tree(operator.like, dict(zip(structs, pieces(vector), strict=True)))

    return Flat(as_outside(matvec), ends[-1], dtype, unflatten)


def as_tree(like: Any, leaves: dict[str, Array]) -> Any:
    """The tree of ``like`` with these floating leaves, in its dtypes; other leaves are float0."""
    remaining = iter(leaves.values())
    return jax.tree.map(
        lambda leaf: (
            next(remaining).astype(leaf.dtype)
            if is_differentiable(leaf)
            else np.zeros(leaf.shape, jax.dtypes.float0)
        ),
        like,
    )


# ---------------- operators


class Operator(abc.ABC):
    r"""A symmetric linear map on trees shaped like the parameters.

    ``operator @ vector`` and ``operator(vector)`` are the product. A vector is any tree with the
    paths and shapes of ``operator.like``. The product has the vector's structure and dtypes; the
    arithmetic runs in the operator's own dtypes. Leaves without a gradient (integers, keys, float0)
    pass unchanged.

    ``a + b``, ``a - b``, ``-a``, ``2.0 * a`` and ``a.damped(delta)`` are operators, never
    matrices. An operator is a pytree: it can be built inside ``jit``, passed to a jitted
    function and returned from one.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((3, 2))}, (3 * jnp.eye(3), jnp.zeros((3, 2)))
        >>> ggn = jk.operators.ggn(objective, params, batch)
        >>> product = (0.5 * ggn).damped(1.0) @ params
        >>> print(product["w"][0])
        [2.5 2.5]
    """

    __array_ufunc__ = None  # so that ``np.float64(2) * operator`` calls the operator's __rmul__

    @property
    @abc.abstractmethod
    def like(self) -> ArrayTree:
        """The tree of ``jax.ShapeDtypeStruct`` that vectors are shaped like.

        ``None`` if the operator takes any tree and was not told the shapes (see ``kronecker``).
        """

    @abc.abstractmethod
    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        """The product with ``{path: leaf}``, floating leaves only, in any floating dtype."""

    @property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """``{path: ShapeDtypeStruct}`` of the floating leaves of ``like``, in its order.

        Raises:
            ValueError: the operator does not know the shapes of its vectors.
        """
        if self.like is None:
            raise ValueError(
                "the operator does not know the shapes of its vectors: build it with them, "
                "jk.operators.kronecker(bases, params), or add it to one that does"
            )
        return partition(self.like)[0]

    @property
    def size(self) -> int:
        """The dimension, which is the number of elements of the floating leaves."""
        return sum(leaf.size for leaf in self.leaves.values())

    def __call__(self, vector: ArrayTree) -> ArrayTree:
        """The product with a tree shaped like ``like``.

        Raises:
            ValueError: a path or a shape of ``vector`` differs from ``like``.
        """
        inputs = self.check(vector)
        out = self.product(inputs)
        # Leaves without a gradient come from the vector, so the product of a tree has all of its
        # leaves.
        return with_leaves(vector, {p: x.astype(inputs[p].dtype) for p, x in out.items()})

    def check(self, vector: ArrayTree) -> dict[str, Array]:
        """Check a vector's paths and shapes against ``like``; return ``{path: floating leaf}``.

        Raises:
            ValueError: naming the leaf that differs.
        """
        floating, _ = partition(vector)
        if self.like is not None:
            _check_same(self.leaves, floating, "vector")
        return floating

    @property
    def loss_terms(self) -> Any:
        """Number of loss terms of the operator's batch.

        ``None`` for an operator without a batch, for the Hessian of a scalar loss, and for a sum,
        whose terms may come from parts of one batch.
        """
        return None

    def inner_products(self, vectors: Sequence[ArrayTree]) -> Float[Array, "k k"]:
        r"""$v_i^\top A v_j$ of ``k`` vectors, in at least float32.

        The curvature of an ``Objective`` or a marked loss needs only forward passes for this.

        Raises:
            ValueError: a path or a shape of a vector differs from ``like``.
        """
        return self.forms([self.check(vector) for vector in vectors])

    def forms(self, vectors: Sequence[dict[str, Array]]) -> Float[Array, "k k"]:
        """:meth:`inner_products` with ``{path: leaf}``, floating leaves only."""
        products = [self.product(vector) for vector in vectors]
        return jnp.stack([jnp.stack([dot(x, y) for y in products]) for x in vectors])

    def to_dense(self) -> Array:
        """The matrix, ``(size, size)``, from one product for each column; for small problems.

        Rows and columns are in the order of ``jax.flatten_util.ravel_pytree(like)``.
        """
        return _to_dense(self)

    def damped(self, damping: Any) -> "Operator":
        r"""$A + \delta I$; ``damping`` is a scalar in the operator's units and may be traced."""
        return Damped(self, _scalar("damping", damping))

    def __matmul__(self, vector: ArrayTree) -> ArrayTree:
        return self(vector)

    def __add__(self, other: object) -> "Operator":
        if not isinstance(other, Operator):
            return NotImplemented
        if self.like is not None and other.like is not None:
            _check_same(self.leaves, other.leaves, "second operator")
        return Sum((self, other))

    def __sub__(self, other: Any) -> "Operator":
        return self + -other if isinstance(other, Operator) else NotImplemented

    def __mul__(self, factor: Any) -> "Operator":
        return Scaled(self, _scalar("factor", factor))

    __rmul__ = __mul__

    def __neg__(self) -> "Operator":
        return self * -1.0


@jax.jit
def _to_dense(operator: Operator) -> Array:
    flat = flatten(operator)
    # One column at a time: under `vmap` each would hold the activations of a batch. `map` stacks
    # products as rows, hence the transpose.
    return jax.lax.map(flat.matvec, jnp.eye(flat.size, dtype=flat.dtype)).T


def dot(x_leaves: Mapping[str, Array], y_leaves: Mapping[str, Array]) -> Float[Array, ""]:
    """The inner product of two trees with the same paths, summed in at least float32."""
    products = []
    for path, x in x_leaves.items():
        # Leaf by leaf in at least float32, because an inner product of a 16-bit leaf has many small
        # summands.
        dtype = statistics_dtype(jnp.result_type(x))
        products.append((x.astype(dtype) * y_leaves[path].astype(dtype)).sum())
    return functools.reduce(jnp.add, products) if products else jnp.zeros(())


def _check_same(expected: Mapping[str, Any], actual: Mapping[str, Any], what: str) -> None:
    for path in actual:
        if path not in expected:
            raise ValueError(
                f"{what}: the operator has no leaf {path!r}; the nearest paths are "
                f"{nearest(path, expected)}"
            )
    for path, leaf in expected.items():
        if path not in actual:
            raise ValueError(
                f"{what}: expected a leaf {path!r} of shape {leaf.shape}, as in operator.like"
            )
        if actual[path].shape != leaf.shape:
            raise ValueError(
                f"{what}: {path!r} has shape {actual[path].shape}, expected {leaf.shape}"
            )


def check_number(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Refuse what is no scalar and, if its value is concrete, what is negative or NaN.

    Args:
        name: Name of the argument, for the message.
        value: Its value.
        above_zero: Whether zero is refused too.
    """
    _scalar(name, value)
    if isinstance(value, Tracer):
        return
    # Written so that NaN, which compares with nothing, is refused.
    if not (float(value) > 0 or (float(value) == 0 and not above_zero)):
        requirement = "a positive number" if above_zero else "zero or a positive number"
        raise ValueError(f"{name}={value}: expected {requirement}")


def _scalar(name: str, value: Any) -> Array:
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        raise TypeError(f"{name}: expected a scalar, got {type(value).__name__}")
    return jnp.asarray(value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(Operator):
    """The sum of operators on the same leaves."""

    terms: Any

    @property
    def like(self) -> ArrayTree:
        likes = [term.like for term in self.terms]
        return next((like for like in likes if like is not None), None)

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        total, *more = (term.product(leaves) for term in self.terms)
        for term_product in more:
            total = {path: x + term_product[path].astype(x.dtype) for path, x in total.items()}
        return total


@dataclasses.dataclass(frozen=True, eq=False)
class _Changed(Operator):
    """An operator made from another one, for the same leaves and loss terms."""

    operator: Any

    @property
    def like(self) -> ArrayTree:
        return self.operator.like

    @property
    def loss_terms(self) -> Any:
        return self.operator.loss_terms


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(_Changed):
    """An operator times a number."""

    factor: Any

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        out = self.operator.product(leaves)
        return {p: x * self.factor.astype(x.dtype) for p, x in out.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Damped(_Changed):
    """An operator plus a multiple of the identity."""

    damping: Any

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        out = self.operator.product(leaves)
        return {
            p: x + self.damping.astype(x.dtype) * leaves[p].astype(x.dtype) for p, x in out.items()
        }
