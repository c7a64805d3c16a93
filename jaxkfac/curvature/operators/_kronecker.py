"""Operators without a batch: the Kronecker curvature, and any linear function."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import jax
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree, leaves_by_path
from jaxkfac._errors import one_of
from jaxkfac.curvature._apply import Missing, apply_power
from jaxkfac.curvature._eigenbases import Eigenbases, check_bases
from jaxkfac.curvature.operators._exact import shapes
from jaxkfac.curvature.operators._operator import Operator, as_tree
from jaxkfac.linalg.spectral import Damping, DampingMode, check_damping

# ---------------- the Kronecker curvature


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KroneckerOperator(Operator):
    """A power of the Kronecker curvature; attributes as in ``kronecker``."""

    bases: Any
    damping: Any
    power: float = dataclasses.field(metadata={"static": True})
    damping_mode: DampingMode = dataclasses.field(metadata={"static": True})
    missing: Missing = dataclasses.field(metadata={"static": True})
    structs: Any = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> ArrayTree:
        if self.structs is None:
            return None
        structure, leaves = self.structs
        return jax.tree.unflatten(structure, leaves)

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        return apply_power(
            leaves, self.bases, self.power, self.damping, self.damping_mode, self.missing
        )


def kronecker(
    bases: Eigenbases,
    params: ArrayTree = None,
    *,
    power: float = 1.0,
    damping: Damping = 0.0,
    damping_mode: DampingMode = "exact",
    missing: Missing = "raise",
) -> KroneckerOperator:
    r"""The block-diagonal Kronecker curvature $(F + \delta)^p$, as an operator.

    Bases with corrected eigenvalues (EKFAC) use these. With ``power=-1.0`` it is the
    preconditioner of :func:`solve`.

    Args:
        bases: From :func:`jaxkfac.eigendecompose`.
        params: The parameters, or their shapes. :func:`jaxkfac.spectrum`, the estimates and
            ``to_dense`` need them, because bases know paths but not shapes. Products,
            preconditioners, and sums with an operator that has shapes do not need them.
        power: $p$, static. Negative powers use clipped eigenvalues, positive ones raw ones.
        damping: $\delta \ge 0$, added to the curvature of the mean loss, or a pair
            ``(damping_a, damping_g)`` in the units of each factor; may be traced.
        damping_mode: See :func:`jaxkfac.apply_power`.
        missing: What to do with parameters that no layer covers.

    Returns:
        A positive semi-definite :class:`Operator`.

    Raises:
        ValueError: negative damping, or an unknown option.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"w": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> bases = jk.eigendecompose(stats(params, batch).factors)
        >>> print((jk.operators.kronecker(bases) @ {"w": 3 * jnp.ones((3, 2))})["w"][0].round(3))
        [2. 2.]
    """
    check_bases(bases)
    check_damping(damping, damping_mode)
    one_of("missing", missing, get_args(Missing))
    structs = None
    if params is not None:
        # A static field needs a hash, which a dictionary of shapes does not have.
        leaves, structure = jax.tree.flatten(shapes(params))
        structs = (structure, tuple(leaves))
    return KroneckerOperator(bases, damping, power, damping_mode, missing, structs)


# ---------------- linear functions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionOperator(Operator):
    """A function that the caller declares linear and symmetric."""

    data: Any
    function: Callable[[Any, ArrayTree], ArrayTree] = dataclasses.field(metadata={"static": True})
    structs: Any = dataclasses.field(metadata={"static": True})

    @property
    def like(self) -> ArrayTree:
        structure, leaves = self.structs
        return jax.tree.unflatten(structure, leaves)

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        vector = as_tree(self.like, {path: leaves[path] for path in self.leaves})
        out = leaves_by_path(self.function(self.data, vector))
        return {path: out[path] for path in leaves}


def from_function(
    function: Callable[[Any, ArrayTree], ArrayTree], data: ArrayTree, like: ArrayTree
) -> FunctionOperator:
    """Make an operator from your own linear function.

    Args:
        function: ``function(data, vector) -> product``, linear and symmetric in ``vector``,
            with a product shaped like it. :func:`jaxkfac.spectrum` checks symmetry, where it
            matters.
        data: Arrays that the function needs. Passed as arguments, they are not compiled in as
            constants.
        like: A tree of arrays, or of their shapes, that vectors are shaped like.

    Returns:
        An operator.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> matrix = jnp.diag(jnp.arange(1.0, 4.0))
        >>> operator = jk.operators.from_function(jnp.matmul, matrix, jnp.zeros(3))
        >>> print(operator @ jnp.ones(3))
        [1. 2. 3.]
    """
    leaves, structure = jax.tree.flatten(like)
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return FunctionOperator(data, function, (structure, structs))
