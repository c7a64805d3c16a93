"""A penalty that keeps an earlier loss low: its quadratic model around an anchor."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from jaxkfac._arguments import ArrayTree, check_arrays, partition
from jaxkfac._errors import (
    NonFiniteFactorError,
    UncoveredParameterError,
    instance_of,
    nearest,
    one_of,
)
from jaxkfac.blocks import DiagonalFactor, Factors, KroneckerFactor, places_of
from jaxkfac.curvature import covered_indices, uncovered_mask
from jaxkfac.interception import Layer
from jaxkfac.uses._posterior_precision import check_positive

_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuadraticPenalty:
    """A function of the parameters, as :func:`quadratic_penalty` returns it; a pytree."""

    anchor: dict[str, Any]  # {path: parameter}, for parameters with a gradient
    blocks: dict[str, Any]  # {layer name: A and G, or a diagonal}, as means
    strength: Any
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    joint: frozenset[str] = dataclasses.field(metadata={"static": True})  # A includes a bias's ones

    def __call__(self, params: ArrayTree) -> Float[Array, ""]:
        """The penalty, in the factors' dtype; ``ValueError`` if the anchor has other parameters."""
        check_arrays("params", params)
        leaves = partition(params)[0]
        shapes = {path: x.shape for path, x in leaves.items()}
        if shapes != (expected := {path: x.shape for path, x in self.anchor.items()}):
            path = min(p for p in {*shapes, *expected} if shapes.get(p) != expected.get(p))
            raise ValueError(
                f"params: leaf {path!r} has shape {shapes.get(path, 'none')}, and the anchor's "
                f"has {expected.get(path, 'none')}"
            )
        terms = [x for layer in self.layers for x in self._of_layer(layer, leaves)]
        dtype = jnp.result_type(*[x.dtype for x in terms])
        total = jnp.stack([x.astype(dtype) for x in terms]).sum()
        return 0.5 * jnp.asarray(self.strength, dtype) * total

    def _of_layer(self, layer: Layer, leaves: dict[str, Array]) -> list[Array]:
        factor = self.blocks[layer.name]
        dtype = jax.tree.leaves(factor)[0].dtype
        paths = {m.path for m in (layer.weight, layer.bias) if m is not None}
        moved = {p: leaves[p].astype(dtype) - self.anchor[p].astype(dtype) for p in paths}
        if isinstance(factor, DiagonalFactor):
            change = moved[layer.weight.path][layer.weight.at]
            return [(jnp.square(change) * factor.diagonal.reshape(change.shape)).sum()]
        kernel, alone = layer.weight.read(moved[layer.weight.path]), []
        if layer.bias is not None:
            row = layer.bias.read(moved[layer.bias.path])
            row = row.reshape(*layer.stack, 1, layer.out_features)
            if layer.name in self.joint:
                kernel = jnp.concatenate([kernel, row], -2)
            else:
                alone = [(row * _times(row, factor.g, dense=layer.g_dense)).sum()]
        product = _times(kernel, factor.g, dense=layer.g_dense).mT
        product = _times(product, factor.a, dense=layer.a_dense).mT
        return [(kernel * product).sum(), *alone]


def _times(rows: Array, side: Array, *, dense: bool) -> Array:
    return jnp.matmul(rows, side, precision=_EXACT) if dense else rows * side[..., None, :]


def quadratic_penalty(
    factors: Factors,
    anchor: ArrayTree,
    *,
    strength: ArrayLike = 1.0,
    missing: Literal["raise", "zero"] = "raise",
) -> QuadraticPenalty:
    r"""$\tfrac s2 \sum_l \langle \Delta W_l, A_l\, \Delta W_l\, G_l \rangle$, a term of any loss.

    With $\Delta W$ the parameters minus the anchor, it is the quadratic model of the loss that the
    factors belong to. Training on a second task with it stays where the first task's loss is low;
    EWC is the same penalty with a diagonal. A parameter that two layers read has the terms of both.
    Scales, and biases that are not joint with their weights, have their own terms.

    Args:
        factors: Factors of the earlier loss at the anchor, summed over its data set.
        anchor: Parameters after the earlier task; a tree like the parameters.
        strength: $s > 0$: 1 gives both mean losses equal weight. May be traced.
        missing: ``"raise"`` refuses parameters that no layer covers; ``"zero"`` leaves them free.

    Returns:
        A function of the parameters, a scalar in the loss's units. It is a pytree: pass it to a
        jitted step as an argument, so that no factor becomes a constant of the program.

    Raises:
        ValueError: an anchor that lacks a parameter of the factors or has another shape, factors
            that make the penalty zero everywhere, or a strength that is not positive.
        NonFiniteFactorError: naming the layer of a factor that is not finite.
        UncoveredParameterError: naming the parameters, with ``missing="raise"``.
        TypeError: ``factors`` is not ``Factors``.

    Memory:
        The factors' means and the anchor; a call takes three copies of the largest layer.

    Example:
        >>> factors = jk.value_grad_and_factors(objective)(params, batch).factors
        >>> penalty = jk.quadratic_penalty(factors, params, strength=0.5)
        >>> float(penalty(params)), bool(penalty(jax.tree.map(lambda x: x + 1, params)) > 0)
        (0.0, True)

    References:
        Hippolyt Ritter et al., "Online Structured Laplace Approximations for Overcoming
        Catastrophic Forgetting", 2018.
    """
    instance_of("factors", factors, Factors, "as jk.value_grad_and_factors gives them")
    one_of("missing", missing, get_args(Literal["raise", "zero"]))
    check_positive("strength", strength)
    check_arrays("anchor", anchor)
    leaves, covered = partition(anchor)[0], covered_indices(factors.layers)
    if absent := [path for path in covered if path not in leaves]:
        raise ValueError(
            f"anchor: no leaf {absent[0]!r}, which the factors cover; the nearest paths are "
            f"{nearest(absent[0], leaves)}"
        )
    free = [
        p for p in leaves if p not in covered or uncovered_mask(leaves[p].shape, covered[p]).any()
    ]
    if free and missing == "raise":
        raise UncoveredParameterError(
            f"no layer of the factors covers all of {', '.join(map(repr, free))}; with "
            "missing='zero' these leaves are free"
        )
    _check_values(factors)
    blocks: dict[str, Any] = {}
    for layer in factors.layers:
        if layer.computed_from:
            raise ValueError(f"{layer.name!r} is computed from parameters: leave it out (layers=)")
        for matrix in filter(None, (layer.weight, layer.bias)):
            jax.eval_shape(matrix.read, leaves[matrix.path])  # raises if the shape differs
        factor: Any = factors[layer.name]  # its class follows from ``is_diagonal``
        diagonal = layer.is_diagonal  # measured eigenvalues (``bases=``) are not used
        blocks[layer.name] = (
            DiagonalFactor(factor.diagonal) if diagonal else KroneckerFactor(factor.a, factor.g)
        )
    joint = frozenset(x.name for x in factors.layers if factors.wants_ones(x))
    return QuadraticPenalty(leaves, blocks, strength, factors.layers, joint)


def _check_values(factors: Factors) -> None:
    """Refuse factors that are not finite, or all zero, if their values are concrete."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(factors)):
        return
    is_zero, sides = True, factors.sides
    for name in factors:
        places = [place for place in places_of(factors.layer(name)) if place in sides]
        arrays = [np.asarray(sides[place].data) for place in places]
        if not all(np.isfinite(x).all() for x in arrays):
            raise NonFiniteFactorError(f"the factors of layer {name!r} are not finite")
        is_zero = is_zero and not all(x.any() for x in arrays)
    if is_zero:
        raise ValueError(
            "factors: every layer has one that is zero, and so is the penalty: add the factors of "
            "a batch whose loss has curvature"
        )
