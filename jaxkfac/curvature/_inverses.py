"""Damped inverses of every factor of a model; two products precondition a layer."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree, is_differentiable, leaves_by_path
from jaxkfac.blocks import (
    BiasMode,
    BlockKronecker,
    Factors,
    Layout,
    Place,
    Side,
    Sides,
    check_all_layers,
    layout_of,
)
from jaxkfac.curvature._eigenbases import map_slices
from jaxkfac.curvature._eigendecompose import block_sums, over
from jaxkfac.curvature._layer_power import load_parts, owners, write_scaled, write_solved
from jaxkfac.curvature._placement import MeshAxis, solve_divided
from jaxkfac.flax import serializable
from jaxkfac.interception import Layer
from jaxkfac.linalg import alike
from jaxkfac.linalg.spectral import (
    Damping,
    DampingMode,
    check_clipping,
    check_damping,
    clip_eigenvalues,
    damped_inverse,
    diagonal_power,
    factor_damping,
    is_separable,
    power_or_zero,
    row_sums,
)


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Inverses(BlockKronecker):
    r"""Inverses of damped factors, $(A + \delta_A)^{-1}$ and $(G + \delta_G)^{-1}$.

    If several layers read one parameter, only the one that preconditions it has inverses.

    Attributes:
        a: ``{layer.name: inverse}``, ``(stack..., in[+1], in[+1])``, or a vector for a diagonal
            side. Layers that share an input share its inverse, stored under the first of them. With
            ``"pi"`` each layer has its own, because the split of the damping depends on G.
        g: ``{layer.name: inverse}``.
        biases: ``{layer.name: inverse}`` of G with the full damping, for biases with a block of
            their own.
        diagonals: ``{layer.name: inverse}``, shaped like the parameter.
        layers: The layers, static.
        bias: ``"joint"`` or ``"separate"``, static.
        shared: Whether layers that share an input share its inverse, static.
        max_condition: See :func:`invert`; static.
        floor: See :func:`invert`; static.
    """

    # A pytree also holds shapes and shardings, so the leaves are not Array here.
    a: dict[str, Any]
    g: dict[str, Any]
    biases: dict[str, Any]
    diagonals: dict[str, Any]
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    bias: BiasMode = dataclasses.field(metadata={"static": True})
    shared: bool = dataclasses.field(metadata={"static": True})
    max_condition: float = dataclasses.field(metadata={"static": True})
    floor: float = dataclasses.field(metadata={"static": True})

    _TABLES: ClassVar[Mapping[str, str]] = {
        table: table for table in ("a", "g", "biases", "diagonals")
    }

    def of(self, layer: Layer) -> tuple[Array, Array]:
        """The inverses of A and G of a layer that has both, in full."""
        reader = _holders(self.layers, self.bias, self.shared)[layer.name]
        return self.in_full(Place("a", reader)), self.in_full(Place("g", layer.name))

    def in_full(self, place: Place) -> Array:
        """The inverse at a place."""
        return self.side(place).in_full().data


@functools.lru_cache(maxsize=64)
def _holders(layers: tuple[Layer, ...], bias: BiasMode, shared: bool) -> dict[str, str]:
    """For each layer, the name of the layer under which the inverse of its A is stored."""
    # With and without the column of ones A is another matrix, so layers that share an input may
    # still need two inverses.
    first: dict[Any, str] = {}
    return {
        x.name: first.setdefault((x.input, bias == "joint" and x.bias is not None), x.name)
        if shared
        else x.name
        for x in _preconditioned(layers)
    }


def _preconditioned(layers: tuple[Layer, ...]) -> list[Layer]:
    """The layers that precondition a parameter; inverses of other layers are never read."""
    names = {owner.layer.name for owner in owners(layers)}
    return [layer for layer in layers if layer.name in names]


def invert(
    factors: Factors,
    *,
    damping: Damping,
    damping_mode: DampingMode,
    max_condition: float = 1e6,
    floor: float = 0.0,
    distribute: MeshAxis | None = None,
) -> Inverses:
    r"""Invert the damped factors of a model, by Cholesky in the graph.

    The damping must be separable (``"factored"``, ``"pi"`` or a pair), so that the inverse of
    $(A + \delta_A) \otimes (G + \delta_G)$ is the product of two inverses. The split by $\pi$ is
    that of :func:`jaxkfac.linalg.spectral.kronecker_power`.

    An eigendecomposition raises eigenvalues below $\lambda_{\max}/\kappa$ or ``floor`` one by one
    and then adds the damping. Here a matrix gets the largest of its damping,
    $\operatorname{tr} M / \kappa$ and ``floor``. If the damping is the largest of these, and no
    eigenvalue would have been raised, the two agree to rounding. Diagonals are clipped as usual.

    Args:
        factors: Sums and counts; their means are inverted. Only one triangle of a matrix is read,
            because it is symmetric.
        damping: $\delta \ge 0$, added to the curvature of the mean loss, or a pair
            ``(damping_a, damping_g)`` in the units of each factor; may be traced.
        damping_mode: ``"factored"`` or ``"pi"``; with a pair it is not used.
        max_condition: $\kappa \ge 1$.
        floor: The least amount added to a factor, in its own units.
        distribute: A mesh axis over whose devices the matrices are divided, as in
            :func:`eigendecompose`.

    Returns:
        The inverses; NaN for a factor that is not finite or not positive definite.

    Raises:
        ValueError: a damping that is not separable, or an argument out of range.

    Memory:
        The results, ``n**2`` for each factor of size ``n`` (with ``"pi"`` one A for each layer),
        and a workspace of twice the largest.

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015, section 6.3.
    """
    how: Any = {"damping": damping, "damping_mode": damping_mode}
    inverses, problems = inversion(factors, **how, max_condition=max_condition, floor=floor)
    solved = _solved(list(problems.values()), distribute)
    sides = {place: Side(x) for place, x in zip(problems, solved, strict=True)}
    return inverses.with_sides({**inverses.sides, **sides})


Problems = dict[Place, tuple[Side, Array]]


def inversion(
    factors: Factors,
    *,
    damping: Damping,
    damping_mode: DampingMode,
    max_condition: float = 1e6,
    floor: float = 0.0,
) -> tuple[Inverses, Problems]:
    """The inverses of diagonals, and what is to be inverted by Cholesky.

    Args:
        factors: As for :func:`invert`, like the others.
        damping: See above.
        damping_mode: See above.
        max_condition: See above.
        floor: See above.

    Returns:
        Inverses that lack those of matrices; and for these ``{place: (sums, shift)}``, where the
        inverse is that of their mean plus the shift.
    """
    check_clipping(max_condition, floor)
    check_separable(damping, damping_mode)
    check_all_layers("invert", factors.turn)
    layout = layout_of(factors.layers, factors.bias)
    sums = {place: block_sums(factors, block) for place, block in layout.blocks.items()}

    def vector(place: Place) -> Array:
        return over(sums[place].data, sums[place].count)

    def clipped(values: Array) -> Array:
        return clip_eigenvalues(values, max_condition, floor)

    inverted: Sides = {}
    problems: Problems = {}
    # With pi the damping of A depends on the layer's own G, so layers cannot share an inverse.
    shared = isinstance(damping, tuple) or damping_mode != "pi"
    holders = _holders(factors.layers, factors.bias, shared)
    layers = _preconditioned(factors.layers)
    for layer in layers:
        if layer.is_diagonal:
            place = Place("diagonals", layer.name)
            values = map_slices(layer, vector(place), clipped)
            inverted[place] = Side(diagonal_power(values, power=-1.0, damping=damping))
    blocks = [layer for layer in layers if not layer.is_diagonal]
    places = {layer.name: (_input_place(layout, layer), Place("g", layer.name)) for layer in blocks}
    read = dict.fromkeys(place for layer in blocks for place in places[layer.name])
    matrices = [place for place in read if sums[place].is_matrix]
    diagonals = [over(sums[place].diagonal, sums[place].count) for place in matrices]
    trace = dict(zip(matrices, row_sums(diagonals), strict=True))

    def mean(place: Place) -> Array:
        if place in trace:
            return trace[place] / sums[place].size
        # The mean of the values that are inverted: they are clipped before the damping is added.
        return clipped(vector(place)).mean(-1)

    def invert_at(target: Place, place: Place, shift: Array) -> None:
        if place not in trace:
            inverted[target] = Side(power_or_zero(clipped(vector(place)) + shift[..., None], -1.0))
            return
        # Cholesky gives no eigenvalues; the trace bounds the largest one from above.
        least = jnp.maximum(trace[place] / max_condition, floor)
        # Sums and divisor instead of the mean, because a refresh in place divides one matrix at a
        # time, right before it is inverted.
        problems[target] = sums[place], jnp.maximum(shift, least)

    of_a, of_g = ([mean(places[layer.name][side]) for layer in blocks] for side in (0, 1))
    shifts = _factor_dampings(of_a, of_g, damping, damping_mode)
    for layer, (to_a, to_g) in zip(blocks, shifts, strict=True):
        name, (a, g) = layer.name, places[layer.name]
        # Once for the layers that share an inverse, by the first of them.
        if holders[name] == name:
            invert_at(Place("a", name), a, to_a)
        invert_at(Place("g", name), g, to_g)
        if layer.bias is not None and factors.bias == "separate":
            # Such a bias has one factor, G, which gets all of the damping instead of a share of it.
            invert_at(Place("biases", name), g, _of_one_factor(damping, sums[g].data.dtype))
    options: Any = {"shared": shared, "max_condition": max_condition, "floor": floor}
    empty = Inverses({}, {}, {}, {}, factors.layers, factors.bias, **options)
    return empty.with_sides(inverted), problems


def _factor_dampings(
    of_a: list[Array], of_g: list[Array], damping: Damping, mode: DampingMode
) -> list[tuple[Array, Array]]:
    """:func:`~jaxkfac.linalg.spectral.factor_damping` of each pair; alike pairs in one call."""
    # A stack may share one A, whose mean is then a scalar beside G's stack.
    pairs = [jnp.broadcast_arrays(a, g) for a, g in zip(of_a, of_g, strict=True)]
    of_a, of_g = [a for a, _ in pairs], [g for _, g in pairs]
    dampings = list(zip(of_a, of_g, strict=True))
    for places in alike(of_a, of_g):
        a, g = (jnp.concatenate([x[i].reshape(-1) for i in places]) for x in (of_a, of_g))
        # One call for all layers of a dtype: on a CPU each small operation is a kernel to compile.
        both = factor_damping(a, g, damping=damping, mode=mode)
        ends = np.cumsum([of_a[i].size for i in places])[:-1]
        to_a, to_g = (jnp.split(jnp.broadcast_to(x, a.shape), ends) for x in both)
        for i, x, y in zip(places, to_a, to_g, strict=True):
            dampings[i] = x.reshape(of_a[i].shape), y.reshape(of_g[i].shape)
    return dampings


def _solved(problems: list[tuple[Side, Array]], axis: MeshAxis | None) -> list[Array]:
    means = [
        (sums.with_data(over(sums.data, sums.count)).in_full().data, shift)
        for sums, shift in problems
    ]
    if axis is not None:
        return solve_divided(means, damped_inverse, axis)
    out: list[Array] = []
    for matrix, shift in means:
        # One after the other: side by side they would each hold their workspace.
        out.append(damped_inverse(matrix, shift, after=out[-1] if out else None))
    return out


def check_separable(damping: object, mode: str) -> None:
    """Refuse a damping under which a block's inverse is not a product of two.

    Raises:
        ValueError: the damping is not separable; the message names the remedy.
    """
    check_damping(0.0 if not isinstance(damping, tuple) else (0.0, 0.0), mode)
    if not is_separable(damping, mode):
        raise ValueError(
            "damping_mode='exact' damps the eigenvalues of a whole block, whose inverse is no "
            "product of two inverses: choose 'pi', 'factored' or a pair of dampings, or keep "
            "eigenvectors"
        )


def identity_inverses(like: Factors, *, damping: Damping, **options: Any) -> Inverses:
    """The result of :func:`invert` for factors that are all the identity.

    Args:
        like: Factors, or their shapes.
        damping: As for :func:`invert`.
        **options: Further options of :func:`invert`.
    """
    shapes = jax.eval_shape(functools.partial(invert, damping=damping, **options), like)

    def filled(side: Side, shift: Array) -> Side:
        x = side.data
        one = jnp.eye(side.size, dtype=x.dtype) if side.is_matrix else jnp.ones((), x.dtype)
        return side.with_data(jnp.broadcast_to(one / (1 + shift.astype(x.dtype)), x.shape))

    one = jnp.ones((), like.terms.dtype)
    to_a, to_g = factor_damping(one, one, damping=damping, mode=options["damping_mode"])
    full = _of_one_factor(damping, one.dtype)
    shifts = {"a": to_a, "g": to_g, "biases": full, "diagonals": full}
    return shapes.with_sides({p: filled(x, shifts[p.table]) for p, x in shapes.sides.items()})


def precondition(tree: ArrayTree, inverses: Inverses) -> ArrayTree:
    r"""Compute $(A + \delta_A)^{-1} W (G + \delta_G)^{-1}$ for every layer of a parameter tree.

    Args:
        tree: A gradient; layers whose parameters it lacks are skipped.
        inverses: From :func:`invert`.

    Returns:
        A tree like ``tree``; leaves that no layer covers are unchanged. The arithmetic runs in the
        inverses' dtype, at its highest precision.
    """
    leaves = leaves_by_path(tree)
    written = dict(leaves)
    free = {path: leaf for path, leaf in leaves.items() if is_differentiable(leaf)}
    for owner in owners(inverses.layers):
        layer = owner.layer
        if layer.is_diagonal:
            write_scaled(free, written, layer, inverses.diagonals[layer.name])
            continue
        a, g = inverses.of(layer)
        joint = inverses.wants_ones(layer)
        if (loaded := load_parts(free, owner, joint=joint, dtype=g.dtype)) is None:
            continue
        form, kernel, row = loaded
        if joint:
            assert kernel is not None and row is not None
            # The bias is the last row of the joint matrix, as the ones are the last column of A.
            both = _times(_times(a, jnp.concatenate([kernel, row], -2)), g)
            kernel, row = both[..., :-1, :], both[..., -1:, :]
        else:
            kernel = None if kernel is None else _times(_times(a, kernel), g)
            row = (
                None if row is None else _times(row, inverses.in_full(Place("biases", layer.name)))
            )
        solved = kernel if form.writes_weight else None, row if form.writes_bias else None
        write_solved(written, layer, solved)
    return jax.tree.unflatten(jax.tree.structure(tree), written.values())


def _times(a: Array, y: Array) -> Array:
    """Multiply; an operand with one axis less than the other stands for a diagonal matrix."""
    if a.ndim < y.ndim:
        return a[..., :, None] * y
    if y.ndim < a.ndim:
        return a * y[..., None, :]
    return jnp.matmul(a, y, precision=jax.lax.Precision.HIGHEST)


def _of_one_factor(damping: Damping, dtype: DTypeLike) -> Array:
    """The damping of a block that has a single factor."""
    return jnp.asarray(damping[1] if isinstance(damping, tuple) else damping, dtype)


def _input_place(layout: Layout, layer: Layer) -> Place:
    bare = Place("a_without_ones", layer.input)
    wants = layout.bias == "joint" and layer.bias is not None
    return bare if bare in layout.blocks and not wants else Place("a", layer.input)
