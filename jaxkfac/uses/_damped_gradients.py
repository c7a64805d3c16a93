"""Damped powers applied to many gradients, and the blocks of a model with their eigenvalues."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxkfac._errors import UnknownLayerError, nearest
from jaxkfac.curvature import (
    DiagonalEigenbasis,
    Eigenbases,
    Form,
    KroneckerEigenbasis,
    Operands,
    Power,
    owners,
    solve,
    uncovered_mask,
)
from jaxkfac.curvature.per_example import read_many, write_many
from jaxkfac.interception import Layer, ParameterMatrix
from jaxkfac.linalg.spectral import check_damping, diagonal_power

# ---------------- a damped power of many gradients


BlockDamping = ArrayLike | Literal["heuristic"]
DampingByLayer = BlockDamping | Mapping[str, Float[Array, ""]]
Solved = tuple[Array | None, Array | None]
Apply = Callable[[Form, Operands, Power], Solved]  # solve, or quadratic

HEURISTIC = 0.1  # fraction of the mean eigenvalue of a block


def precondition_many(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float = -1.0,
) -> dict[str, Float[Array, "many ..."]]:
    r"""$(F + \delta)^p \nabla_m$ for gradients stacked along a leading axis.

    Args:
        gradients: ``{parameter path: (many, *parameter)}``.
        bases: The eigenbases.
        damping: $\delta \ge 0$, added to the curvature of the mean loss; or ``"heuristic"``: a
            tenth of the mean of the clipped eigenvalues of each block, and of each entry of a
            stack; or ``{layer name: number}``.
        power: $p < 0$.

    Returns:
        A mapping like ``gradients``; elements that no block covers are 0.

    Memory:
        A copy of the gradients, and some copies of those of the largest layer, or of one of its
        iterations if it is scanned.
    """
    # Zeros and not the gradients: an element that no block covers has no curvature to be divided
    # by.
    written = {path: jnp.zeros_like(leaf) for path, leaf in gradients.items()}
    for layer, solved in precondition_blocks(gradients, bases, damping, power):
        for matrix, value in zip((layer.weight, layer.bias), solved, strict=True):
            if matrix is not None and value is not None:
                written[matrix.path] = write_many(written[matrix.path], matrix, value, layer)
    return written


def precondition_blocks(
    gradients: Mapping[str, Float[Array, "many ..."]],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float = -1.0,
) -> Iterator[tuple[Layer, Solved]]:
    """The results of :func:`precondition_many`, layer by layer.

    Yields:
        The layer, and its weight and bias in the form of :func:`read_many`; ``None`` for one that
        another layer writes.
    """
    yield from by_block(gradients, bases, damping, power, solve)


def by_block(
    gradients: Mapping[str, Any],
    bases: Eigenbases,
    damping: DampingByLayer,
    power: float,
    apply: Apply,
) -> Iterator[tuple[Layer, Solved]]:
    """Apply ``solve`` or ``quadratic`` to each gradient, for each layer's block."""
    for owner in owners(bases.layers):
        layer, basis = owner.layer, bases.basis(owner.layer)
        delta: Any = damping[layer.name] if isinstance(damping, Mapping) else damping
        kernel = read_many(gradients[layer.weight.path], layer.weight, layer)
        row = None
        if layer.bias is not None:
            row = read_many(gradients[layer.bias.path], layer.bias, layer)
        if isinstance(basis, DiagonalEigenbasis):
            scaled = kernel * diagonal_power_of(layer, basis, delta, power)
            # A quadratic form is summed over the elements of the parameter; the axes of the stack
            # and of the many gradients remain.
            yield layer, (scaled if apply is solve else (kernel * scaled).sum((-2, -1)), None)
            continue
        form = Form(bases.wants_ones(layer), owner.writes_weight, owner.writes_bias)
        dtype = basis.a_values.dtype
        row = None if row is None else row.astype(dtype)
        block = Operands(kernel.astype(dtype), row, basis)
        yield layer, _solved(form, block, delta, power, apply)


def _solved(
    form: Form, block: Operands, damping: BlockDamping, exponent: float, apply: Apply
) -> Solved:
    """``apply`` to ``(stack..., many, in, out)``, one entry of the stack at a time."""

    def apply_to_each(
        form: Form, kernel: Array | None, row: Array | None, basis: Any, damping: Any
    ) -> Any:
        power = Power(exponent, damping, "exact", 0.0)
        return jax.vmap(lambda w, b: apply(form, Operands(w, b, basis), power))(kernel, row)

    def one(block: Operands) -> tuple[Array | None, Array | None]:
        kernel, row, basis = block
        weight, bias = None, None
        if kernel is not None:
            # A joint bias is a row of the block and shares its damping and eigenvectors.
            beside = row if form.joint else None
            weight, bias = apply_to_each(form, kernel, beside, basis, of_block(basis, damping))
        if row is not None and not form.joint:  # a separate block, with its own damping
            bias = apply_to_each(form, None, row, basis, of_bias(basis, damping))[1]
        return weight, bias

    # A joint block needs both gradients, even if another layer writes one of them; otherwise a
    # gradient that is not written is not solved.
    block = block._replace(kernel=block.kernel if form.joint or form.writes_weight else None)
    if not form.joint and not form.writes_bias:
        block = block._replace(row=None)
    stack = block.basis.a_values.shape[:-1]
    if not stack:
        return one(block)
    flat = jax.tree.map(lambda x: x.reshape(math.prod(stack), *x.shape[len(stack) :]), block)
    # One iteration at a time, because some copies of the gradients of a layer are alive in each.
    weight, bias = jax.lax.map(one, flat)
    weight, bias = (None if x is None else x.reshape(*stack, *x.shape[1:]) for x in (weight, bias))
    return weight, bias


def of_block(basis: KroneckerEigenbasis, damping: BlockDamping) -> Any:
    """The damping of a block of two factors."""
    if basis.measured is not None:
        # The mean is formed in the block's unit, which keeps the values in range.
        mean = jnp.maximum(basis.measured.values, 0).mean() * jnp.square(basis.measured.root[0, 0])
    else:
        # The mean of all products is the product of the means, so the products need not be formed.
        mean = jnp.maximum(basis.a_values, 0).mean() * jnp.maximum(basis.g_values, 0).mean()
    return _share_of(mean, damping)


def of_bias(basis: KroneckerEigenbasis, damping: BlockDamping) -> Any:
    """The damping of a bias with a block of its own."""
    values = basis.g_values if basis.bias_values is None else basis.bias_values
    return _share_of(jnp.maximum(values, 0).mean(), damping)


def _share_of(mean: Array, damping: BlockDamping) -> Any:
    return HEURISTIC * mean if isinstance(damping, str) else damping


def diagonal_power_of(
    layer: Layer, basis: DiagonalEigenbasis, damping: BlockDamping, power: float
) -> Array:
    """The power of a diagonal, ``(stack..., 1, 1, n)``; each slice has its own damping."""
    rows = diagonal_rows(layer, basis.diagonal)[..., None, None, :]
    delta = _share_of(rows.mean(-1, keepdims=True), damping)
    return diagonal_power(rows, power=power, damping=delta)


def diagonal_rows(layer: Layer, values: Array) -> Float[Array, "*stack n"]:
    """The diagonal of a parameter or of the layer's slice as rows; negative values become 0."""
    full_parameter = dataclasses.replace(layer.weight, index=())
    # A diagonal is stored for the parameter or for the layer's slice of it; the number of elements
    # tells which.
    matrix = (full_parameter if values.size == full_parameter.size else layer.weight).read(values)
    return jnp.maximum(matrix.reshape(*layer.stack, -1), 0)


def check_block_damping(damping: Any, bases: Eigenbases) -> None:
    """Refuse an invalid damping, and zero where a block is singular, as far as values are concrete.

    Raises:
        ValueError: a string other than ``"heuristic"``, a pair, a negative number, or zero for a
            factor that is singular to rounding, with the layer's name.
    """
    if isinstance(damping, str):
        if damping != "heuristic":
            raise ValueError(f'damping={damping!r}: expected "heuristic", or a number')
        return
    if isinstance(damping, tuple):
        raise ValueError(
            f'damping={damping}: expected "heuristic", or one number: a pair is added to the '
            "factors, and these results are of F plus a multiple of the identity"
        )
    check_damping(damping, "exact")
    # Only without damping does a zero eigenvalue matter.
    if not _is_zero(damping):
        return
    for layer in bases.layers:
        basis = bases.basis(layer)
        if isinstance(basis, DiagonalEigenbasis):
            # By slice, as it was clipped: one slice may be of another scale than the next.
            sides = {"diagonal": diagonal_rows(layer, basis.diagonal)}
        # Measured values belong to the block, and the factors' own are not used.
        elif basis.values is not None:
            sides = {"block": basis.values.reshape(*layer.stack, -1)}
        else:
            sides = {"A": basis.a_values, "G": basis.g_values}
        for side, values in sides.items():
            _check_regular(layer, side, values)


def _check_regular(layer: Layer, side: str, values: Array | np.ndarray) -> None:
    if isinstance(values, Tracer):
        return
    eigenvalues = np.asarray(values, np.float64)
    # A decomposition knows an eigenvalue to about n eps of the largest one.
    rounding = eigenvalues.shape[-1] * float(jnp.finfo(values.dtype).eps)
    number = int((eigenvalues <= rounding * eigenvalues.max(-1, keepdims=True)).sum())
    if number:
        raise ValueError(
            f"damping=0, and {number} eigenvalues of layer {layer.name!r} ({side}) are zero to "
            'rounding: add a damping, "heuristic" say, or decompose with a max_condition below '
            f"1 / (n eps) = {1 / rounding:.3g}"
        )


def _is_zero(damping: Any) -> bool:
    is_concrete = not isinstance(damping, str | Tracer)
    return is_concrete and jnp.shape(damping) == () and float(damping) == 0


# ---------------- blocks and the parameters they own


class OwnedBlock(NamedTuple):
    """A layer, and the parameters that its block preconditions.

    Attributes:
        layer: The layer.
        parameters: Its weight, its bias, or both.
    """

    layer: Layer
    parameters: tuple[ParameterMatrix, ...]


def owned_blocks(bases: Eigenbases) -> list[OwnedBlock]:
    """The layers that own parameters, in their order.

    Raises:
        ValueError: two different layers own a weight and its joint bias.
    """
    by_name = {}
    for owner in owners(bases.layers):
        layer = owner.layer
        both = (layer.weight, owner.writes_weight), (layer.bias, owner.writes_bias)
        parameters = tuple(matrix for matrix, mine in both if matrix is not None and mine)
        if bases.wants_ones(layer) and len(parameters) == 1:
            raise ValueError(
                f"the weight of layer {layer.name!r} and its bias are one block, and another layer "
                'answers for one of them: collect factors with bias="separate"'
            )
        by_name[layer.name] = OwnedBlock(layer, parameters)
    return [by_name[layer.name] for layer in bases.layers if layer.name in by_name]


def block_eigenvalues(bases: Eigenbases, block: OwnedBlock) -> tuple[Array | None, Array | None]:
    """Raw eigenvalues of a layer's blocks; negative ones become 0.

    Returns:
        Eigenvalues of the weight's block (with a joint bias, of both), ``(stack..., in[+1], out)``,
        or ``(stack..., n)`` for a diagonal; and of the block of a separate bias,
        ``(stack..., out)``. ``None`` for a parameter that another layer owns.
    """
    layer, basis, weight, bias = block.layer, bases.basis(block.layer), None, None
    if isinstance(basis, DiagonalEigenbasis):
        return diagonal_rows(layer, basis.raw_diagonal), None
    if layer.weight in block.parameters:
        raw = basis.raw_values
        a, g = (jnp.maximum(x, 0) for x in (basis.a_raw_values, basis.g_raw_values))
        weight = a[..., :, None] * g[..., None, :] if raw is None else jnp.maximum(raw, 0)
    if layer.bias in block.parameters and not bases.wants_ones(layer):
        raw = basis.bias_raw_values
        bias = jnp.maximum(basis.g_raw_values if raw is None else raw, 0)
    return weight, bias


def check_disjoint(blocks: Sequence[OwnedBlock], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse blocks if two of them own the same elements of a parameter.

    Raises:
        UnknownLayerError: the bases cover a parameter that does not exist.
        ValueError: naming the layers.
    """
    readers: dict[str, list[tuple[str, ParameterMatrix]]] = {}
    for block in blocks:
        for matrix in block.parameters:
            readers.setdefault(matrix.path, []).append((block.layer.name, matrix))
    for path, owned in readers.items():
        if path not in shapes:
            raise UnknownLayerError(
                f"the bases cover {path!r}, and there is no such parameter; the nearest paths are "
                f"{nearest(path, shapes)}"
            )
        mask = uncovered_mask(shapes[path], {matrix.index for _, matrix in owned})
        # An entry of the mask stands for all elements along the axes that the mask lacks.
        size = math.prod(shapes[path])
        covered = size - size // mask.size * int(mask.sum())
        if sum(matrix.size for _, matrix in owned) > covered:
            names = ", ".join(repr(name) for name, _ in owned)
            raise ValueError(
                f"{names} answer for the same elements of {path!r}: choose one with layers="
            )
