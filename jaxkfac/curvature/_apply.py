"""Powers of the Kronecker curvature applied to parameter trees."""

import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree, check_arrays, is_differentiable, leaves_by_path
from jaxkfac._errors import UncoveredParameterError, UnknownLayerError, nearest, one_of
from jaxkfac.curvature._eigenbases import Eigenbases, check_bases
from jaxkfac.curvature._layer_power import (
    Form,
    Operands,
    Owner,
    Power,
    covered_indices,
    load_block,
    owners,
    scale_diagonal,
    solve,
    uncovered_mask,
    write_solved,
)
from jaxkfac.curvature._placement import put_result, result_sharding
from jaxkfac.linalg.spectral import Damping, DampingMode, check_damping, check_rcond

# ---------------- stacking small layers


Name = TypeVar("Name", bound=Hashable)

# Stacking copies the eigenvectors, n^2 elements for each side. Measured for 48 layers on two CPU
# cores, stacked against one by one: under jit 1.0 ms against 1.7 at side 16, 3.3 against 3.5 at
# side 64, 29 against 25 at side 128; outside jit 58 ms against 126 at side 16. Under jit the CPU
# compiles 30 ms longer for each layer, because every slice taken from the stack is its own kernel.
LARGEST_STACKED_SIDE = 64


def is_small(*sides: int) -> bool:
    """Whether matrices of these sizes are worth stacking."""
    return max(sides) <= LARGEST_STACKED_SIDE


def map_in_batches(
    function: Callable[[Any, ArrayTree], ArrayTree], problems: Mapping[Name, tuple[Any, ArrayTree]]
) -> dict[Name, ArrayTree]:
    """``{name: function(static, arrays)}``, with one call for all problems that look alike.

    Problems look alike if their static parts are equal, and their arrays agree in structure,
    shape, dtype and devices. Arrays that lie differently on the same devices of an automatic mesh
    are stacked too, which may change the sharding of a result and changes no value. The cost is
    linear in the number of problems.

    Args:
        function: Called with arrays that have one more leading axis if several problems
            were stacked; it must treat leading axes as a batch.
        problems: ``{name: (static, arrays)}``.

    Returns:
        The results by name.
    """
    alike: dict[Hashable, list[Name]] = defaultdict(list)
    for name, (static, arrays) in problems.items():
        leaves, structure = jax.tree.flatten(arrays)
        alike[static, structure, *map(_looks, leaves)].append(name)
    results: dict[Name, ArrayTree] = {}
    for names in alike.values():
        static = problems[names[0]][0]
        arrays = [problems[name][1] for name in names]
        if len(names) == 1:
            results[names[0]] = function(static, arrays[0])
            continue
        together = function(static, jax.tree.map(lambda *xs: jnp.stack(xs), *arrays))
        for i, name in enumerate(names):
            results[name] = jax.tree.map(lambda x, i=i: x[i], together)
    return results


def _looks(x: Array) -> Hashable:
    # A tracer has no devices; its type carries explicit shardings and, in shard_map, varying axes.
    kind = jax.typeof(x)
    return (kind, None) if isinstance(x, Tracer) else (kind, frozenset(x.sharding.device_set))


# ---------------- scanned layers whose eigenvectors do not fit on the device


_Solved = tuple[Array | None, Array | None]


def solve_block(form: Form, block: Operands, power: Power) -> _Solved:
    """:func:`solve`, one iteration at a time if the eigenvectors need it.

    Eigenvectors in host memory cross to the device one iteration at a time, outside ``jit``. Those
    with fewer bits than the arithmetic are widened one iteration at a time.

    Raises:
        TypeError: eigenvectors in host memory, under ``jit``.
    """
    vectors = [x for x in (block.basis.a_vectors, block.basis.g_vectors) if x is not None]
    if any(isinstance(x, np.ndarray) for x in vectors):
        return _from_host(form, block, power)
    stacked = block.basis.a_values.ndim > 1
    if stacked and any(x.dtype != block.basis.a_values.dtype for x in vectors):
        flat = _flattened(block)
        solved = jax.lax.map(lambda one: solve(form, one, power), flat)
        return _restored(solved, block)
    return solve(form, block, power)


def _from_host(form: Form, block: Operands, power: Power) -> _Solved:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((block, power.damping))):
        raise TypeError(
            "the eigenvectors are in host memory, and cross to the device one layer at a time: "
            "precondition outside of jit, or keep them on the device (bases_in='device')"
        )
    flat = _flattened(block)
    where = result_sharding(block.kernel if block.kernel is not None else block.row)
    out = _zeros(flat.kernel), _zeros(flat.row)
    for i in range(len(flat.basis.a_values)):
        one = jax.tree.map(
            lambda x, i=i: put_result(x[i], where) if isinstance(x, np.ndarray) else x[i], flat
        )
        # Dispatch runs ahead of the device: without a wait it would send every slice at once.
        jax.block_until_ready(out)
        static_power = (power.exponent, power.mode, power.cut)
        out = _solved_into(out, one, i, power.damping, form=form, static_power=static_power)
    return _restored(out, block)


@functools.partial(jax.jit, static_argnames=("form", "static_power"), donate_argnames="out")
def _solved_into(
    out: _Solved,
    one: Operands,
    index: ArrayLike,
    damping: Damping,
    *,
    form: Form,
    static_power: tuple[Any, ...],
) -> _Solved:
    exponent, mode, cut = static_power
    solved = solve(form, one, Power(exponent, damping, mode, cut))
    weight, bias = (
        None if old is None or new is None else old.at[index].set(new)
        for old, new in zip(out, solved, strict=True)
    )
    return weight, bias


def _zeros(like: Array | None) -> Array | None:
    return None if like is None else jnp.zeros_like(like)


def _flattened(block: Operands) -> Operands:
    """Merge the axes of the stack into one, of length 1 if there is no stack."""
    axes = block.basis.a_values.ndim - 1
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]), block)


def _restored(solved: _Solved, block: Operands) -> _Solved:
    stack = block.basis.a_values.shape[:-1]
    weight, bias = (None if x is None else x.reshape(*stack, *x.shape[1:]) for x in solved)
    return weight, bias


# ---------------- powers of the curvature of a model


Missing = Literal["raise", "identity", "zero"]


def apply_power(
    tree: ArrayTree,
    bases: Eigenbases,
    power: float = -1.0,
    damping: Damping = 0.0,
    damping_mode: DampingMode = "exact",
    missing: Missing = "raise",
    cut: float = 0.0,
) -> ArrayTree:
    r"""Apply $(F + \delta)^p$ to a tree shaped like the parameters, block by block.

    A layer's block is $F = A \otimes G$ on its matrix $W$, with the bias as the last row
    if it is joint. Eigenvalues are clipped for negative powers and raw for positive
    ones (a negative rounding error counts as 0). With $V = Q_A^\top W Q_G$ and
    $\lambda_{ij}$ the damped eigenvalues,

    $$ (F + \delta)^p\, W = Q_A \bigl(\lambda^p \odot V\bigr) Q_G^\top . $$

    A damped eigenvalue of 0 gives 0 at every power, so undamped negative powers are powers
    of the pseudo-inverse. With ``bias="separate"`` the bias's block is $G$. Scales and lone
    biases divide by (the power of) their damped diagonal.

    Clipping raises small eigenvalues and damping adds to them, so neither removes a direction.
    ``cut`` does: $\lambda_{ij}$ counts as 0, before clipping and damping, if its raw value
    satisfies $\lambda_{A,i}\lambda_{G,j} \le c\, \max \lambda_A \max \lambda_G$. With
    ``max_condition=inf`` and no damping this is ``numpy.linalg.pinv`` with ``rcond=c``.

    Layers of equal shape with sides of at most 64 are stacked and solved in one batched product.
    Larger ones are solved one by one, because copying their eigenvectors costs more than that
    saves.

    Args:
        tree: A gradient, or any tree with the parameters' paths and shapes.
        bases: From :func:`eigendecompose`.
        power: $p$, static.
        damping: $\delta \ge 0$, added to the curvature of the mean loss, in units of its squared
            gradient, or a pair ``(damping_a, damping_g)`` in the units of each factor; may be
            traced.
        damping_mode: ``"exact"``, ``"factored"`` or ``"pi"``, see
            :func:`jaxkfac.linalg.spectral.kronecker_power`. A pair is always added per factor.
            Blocks of one factor (diagonals, separate biases) have one form.
        missing: What to do with parameters, or slices of them, that no layer covers:
            ``"raise"``; ``"identity"`` keeps them; ``"zero"`` zeroes them. With the latter two,
            layers whose parameters ``tree`` lacks (``optax.masked``) are skipped, with a warning
            outside ``jit`` if these are all layers; if ``tree`` lacks one of a weight and its joint
            bias, that one counts as 0.
        cut: $c \in [0, 1)$, static, relative to the largest raw eigenvalue of the block (of
            each stacked slice, diagonals and separate biases included). 0 removes nothing. With a
            positive value, a block that is zero gives 0 whatever the damping.

    Returns:
        A tree like ``tree``, leaf for leaf in shape and dtype; the arithmetic runs in the
        factors' dtype. Leaves without a gradient (integers, keys, float0) pass unchanged.

    Raises:
        UncoveredParameterError: naming the uncovered paths, with ``missing="raise"``.
        UnknownLayerError: a layer's parameter is not in ``tree``, with ``missing="raise"``.
        ValueError: negative damping, a cut outside ``[0, 1)``, an unknown option, bases
            without vectors, or a leaf of another shape than its parameter.
        TypeError: ``bases`` is not eigenbases, but for example factors; or their eigenvectors are
            in host memory (``HostCurvature(bases_in="host")``) and closed over under ``jit``.
            (As arguments of a jitted function they are all on the device already.)

    Memory:
        Two matrices of the largest layer beyond the result; with eigenvectors in host memory, also
        the eigenvectors of two iterations of a layer. For stacked layers, a second copy of their
        eigenvectors and matrices (at most 64 KiB a layer in float32).

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> bases = jk.eigendecompose(factors)
        >>> print(jk.apply_power(grads, bases, power=-0.5, damping=1.0)["kernel"][0])
        [0.2581989 0.2581989]

    References:
        Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate
        curvature, 2015.
    """
    check_bases(bases)
    check_arrays("tree", tree)
    check_damping(damping, damping_mode)
    check_rcond(cut)
    one_of("missing", missing, get_args(Missing))
    leaves: dict[str, Array] = {}
    written: dict[str, Array] = {}
    for path, leaf in leaves_by_path(tree).items():
        free = is_differentiable(leaf)
        leaves[path] = jnp.asarray(leaf) if free else leaf
        # The initial value, which stays where no layer writes.
        written[path] = jnp.zeros_like(leaf) if free and missing == "zero" else leaves[path]
    if missing == "raise":
        _check_covered(leaves, bases)
    elif not any(isinstance(x, Tracer) for x in leaves.values()):
        _warn_of_another_model(leaves, bases)
    damped_power = Power(power, damping, damping_mode, cut)
    owned = owners(bases.layers)
    stacked = _solve_small(leaves, bases, owned, damped_power)
    for owner in owned:
        layer = owner.layer
        if layer.is_diagonal:
            scale_diagonal(leaves, written, layer, bases.diagonal_basis(layer), damped_power)
        elif layer.name in stacked:
            write_solved(written, layer, stacked[layer.name])
        elif (loaded := load_block(leaves, owner, bases)) is not None:
            write_solved(written, layer, solve_block(*loaded, damped_power))
    return jax.tree.unflatten(jax.tree.structure(tree), written.values())


def _solve_small(
    leaves: dict[str, Array], bases: Eigenbases, owned: Sequence[Owner], damped_power: Power
) -> dict[str, Any]:
    """Solve small unscanned layers, equal ones in one call; large ones are not even loaded."""
    problems = {}
    for owner in owned:
        layer = owner.layer
        small = is_small(layer.in_features, layer.out_features)
        if layer.is_diagonal or layer.stack or not small:
            continue
        if (loaded := load_block(leaves, owner, bases)) is not None:
            form, block = loaded  # eigenvectors may be in host memory
            problems[layer.name] = form, jax.tree.map(jnp.asarray, block)
    return map_in_batches(lambda form, block: solve(form, block, damped_power), problems)


def natural_gradient(
    grads: ArrayTree,
    bases: Eigenbases,
    *,
    damping: Damping,
    damping_mode: DampingMode = "exact",
    missing: Missing = "raise",
    cut: float = 0.0,
) -> ArrayTree:
    r"""$(F + \delta)^{-1} \nabla$: :func:`apply_power` with power -1 and clipped values.

    For a kernel ``(in, out)`` this is $A^{-1} \nabla G^{-1}$. The arguments are those of
    :func:`apply_power`, damping with its units among them; it has no default here, because it is a
    choice.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> bases = jk.eigendecompose(factors)
        >>> print(jk.natural_gradient(grads, bases, damping=1.0)["kernel"][0].round(3))
        [0.2 0.2]
    """
    return apply_power(grads, bases, -1.0, damping, damping_mode, missing, cut)


def fisher_vector_product(
    tree: ArrayTree, bases: Eigenbases, *, missing: Missing = "raise"
) -> ArrayTree:
    r"""$F v$: :func:`apply_power` with power +1, raw eigenvalues and no damping.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> bases = jk.eigendecompose(factors)
        >>> product = jk.fisher_vector_product({"kernel": 3 * jnp.ones((3, 2))}, bases)
        >>> print(product["kernel"][0].round(3))
        [2. 2.]
    """
    return apply_power(tree, bases, 1.0, missing=missing)


def _warn_of_another_model(leaves: Mapping[str, Any], bases: Eigenbases) -> None:
    """Warn if the tree has the parameter of no layer, so that ``missing`` decides everything."""
    both = ((layer.weight, layer.bias) for layer in bases.layers)
    covered = [part.path for parts in both for part in parts if part is not None]
    if not leaves or not covered or any(path in leaves for path in covered):
        return
    warnings.warn(
        f"none of the layers of these bases is in the tree, which therefore gets no curvature: the "
        f"first is {covered[0]!r}, and the nearest paths are {nearest(covered[0], leaves)}; pass "
        "the gradient of the model whose factors were decomposed",
        stacklevel=3,
    )


def _check_covered(leaves: dict[str, Array], bases: Eigenbases) -> None:
    indices = covered_indices(bases.layers)
    absent = [path for path in indices if path not in leaves]
    if absent:
        raise UnknownLayerError(
            f"the tree has no leaf {absent[0]!r}, which the bases cover; the nearest paths are "
            f"{nearest(absent[0], leaves)}. Pass missing='identity' or 'zero' to pass it over"
        )
    uncovered = [
        path
        for path, leaf in leaves.items()
        if is_differentiable(leaf)
        and (path not in indices or uncovered_mask(leaf.shape, indices[path]).any())
    ]
    if uncovered:
        raise UncoveredParameterError(
            f"no layer covers all of {', '.join(map(repr, uncovered))}; pass missing='identity' "
            "to keep these leaves as they are, or missing='zero' to zero them"
        )
