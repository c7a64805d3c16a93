"""Adapters in other forms: merged into kernels, or given a nonlinearity."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkfac._arguments import ArrayTree, leaves_by_path, with_leaves
from jaxkfac.interception import Layer, LayerVjp, Site
from jaxkfac.interception.values import encoded_paths
from jaxkfac.kinds import Rows, in_own_order
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._attach import Adapted, check_leaves, check_rank
from jaxkfac.lslora._branch import Branch
from jaxkfac.lslora._config import Adapters, Config, EmbeddingAdapter, only_adapters
from jaxkfac.lslora._diagnose import measure
from jaxkfac.lslora._nonlinearity import EPSILON, FOURIER

# ---------------- merging into kernels: exact for plain LoRA, else approximate


class ApproximateMerge(NamedTuple):
    """Result of :func:`approximate_merge`.

    Attributes:
        params: The base model with changed kernels (and biases).
        errors: For each slice of each layer, the root mean square over the batch of the part of
            the branch's output that the kernel does not reproduce, relative to that output's root
            mean square. 0 is exact, and 1 is no better than without the adapter. Values below
            1e-3 are rounding.
    """

    params: ArrayTree
    errors: dict[str, Float[np.ndarray, "*stack"]]


def merge(adapted: Adapted, params: ArrayTree, adapters: Adapters, inputs: ArrayTree) -> ArrayTree:
    """Add plain LoRA to the base model's kernels: the same function, without a branch.

    Where adapters separate a head from the embedding that it was tied to, the result has the head
    as another parameter, ``lm_head/kernel``, and the model's ``apply_fn`` uses it.

    Args:
        adapted: From :func:`attach`, with ``fourier_placement="none"``.
        params: The base model.
        adapters: Its adapters; parameters of ``modules_to_save`` replace the base model's.
        inputs: A batch, for its shapes.

    Raises:
        ValueError: the adapters have a nonlinearity, or leaves or a rank that do not fit the layer
            and the config; or a kernel is also read by something that is not adapted, or is
            multiplied by a constant before its use.

    Example:
        >>> import jax, jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> def apply_fn(params, x):
        ...     return x @ params["kernel"]
        >>> params, x = {"kernel": jnp.ones((3, 2))}, jnp.ones((5, 3))
        >>> config = lslora.Config(rank=1, target="kernel", fourier_placement="none")
        >>> adapters = lslora.init(apply_fn, config, params, x, key=jax.random.key(0))
        >>> merged = lslora.merge(lslora.attach(apply_fn, config), params, adapters, x)
        >>> bool((merged["kernel"] == params["kernel"]).all())
        True
    """
    nonlinear = [name for name, x in only_adapters(adapters).items() if not x.is_linear]
    if nonlinear:
        raise ValueError(
            f"{', '.join(nonlinear)} cannot be merged: phi is not linear, so there is no kernel W' "
            "with x W' = x W + phi(x A B) for every x. Keep the adapter attached, or see "
            "jk.lslora.approximate_merge, which fits a kernel by least squares and reports its "
            "error"
        )

    def product(layer: Layer) -> tuple[Array, None]:
        adapter = check_leaves(only_adapters(adapters)[layer.name], layer, adapted.config)
        check_rank(layer.name, adapter, adapted.config)
        wide = statistics_dtype(adapter.a.dtype)
        a, b = adapter.a.astype(wide), adapter.b.astype(wide)
        highest = jax.lax.Precision.HIGHEST
        return adapted.config.scaling(layer.name) * jnp.matmul(a, b, precision=highest), None

    return _written(adapted, params, adapters, inputs, product)


def approximate_merge(
    adapted: Adapted, params: ArrayTree, adapters: Adapters, inputs: ArrayTree
) -> ApproximateMerge:
    r"""Replace each branch of the model by the linear map nearest to it on a batch.

    For each slice of each layer, with input rows $x$ and the branch's outputs $v$, the kernel
    gets $M = \arg\min \sum \|v - x M\|^2$, and the layer's bias, if it has one, an intercept. The
    batch should be typical and have more rows than a layer has inputs: directions that its inputs
    do not cover are not fitted.

    Args:
        adapted: From :func:`attach`.
        params: The base model.
        adapters: Its adapters.
        inputs: A batch; takes one backward pass.

    Returns:
        An :class:`ApproximateMerge`; check its ``errors`` before using the parameters.

    Raises:
        ValueError: as for :func:`merge`, except for the nonlinearity; or no gradient reaches a
            layer (only indices of its outputs are used, say), so that nothing can be measured; or
            what is measured is not finite.

    Warns:
        UserWarning: the batch has fewer rows than a layer has inputs, so that a kernel can fit it
            without errors and still be wrong for other inputs.

    Memory:
        ``in (in + out)`` elements for each slice of each layer.
    """
    own_adapters = only_adapters(adapters)
    if lookups := [n for n, x in own_adapters.items() if isinstance(x, EmbeddingAdapter)]:
        raise ValueError(
            f"{', '.join(lookups)} are embeddings, which have no inputs to fit a kernel to: leave "
            "them out with exclude=, or train plain LoRA, which merge() adds"
        )
    params = adapted.separated(params, list(adapters))
    traced = adapted.traced(params, inputs, None, tuple(own_adapters))
    ones = {name: traced.table[name].bias is not None for name in own_adapters}

    def moments(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
        use, dtype = site.uses[0], statistics_dtype(branch.added.dtype)
        kind: Any = use.kind
        vjp = LayerVjp(site, use, operands, branch.added)  # the rows of what the branch adds
        x = _matrix(vjp, kind.input_rows(vjp)).astype(dtype)
        v = _matrix(vjp, kind.output_rows(vjp)).astype(dtype)
        x = jnp.broadcast_to(x, (*v.shape[:-1], x.shape[-1]))  # experts read the same rows
        if ones[str(use.layer)]:
            x = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), dtype)], -1)
        highest = jax.lax.Precision.HIGHEST
        return {
            "xx": jnp.einsum("...ni,...nj->...ij", x, x, precision=highest),
            "xv": jnp.einsum("...ni,...no->...io", x, v, precision=highest),
            "vv": jnp.square(v).sum((-2, -1)),
            "count": jnp.full(v.shape[:-2], v.shape[-2]),
        }

    like = {}
    for name in own_adapters:
        layer, dtype = traced.table[name], statistics_dtype(own_adapters[name].b.dtype)
        n, m = layer.in_features + ones[name], layer.out_features
        shapes = {"xx": (n, n), "xv": (n, m), "vv": (), "count": ()}
        like[name] = {key: jnp.zeros((*layer.stack, *s), dtype) for key, s in shapes.items()}
    sums = jax.device_get(measure(adapted, params, adapters, inputs, moments, like))
    if unread := [name for name, sum_of in sums.items() if not np.all(sum_of["count"])]:
        raise ValueError(
            f"{', '.join(unread)} cannot be fitted: no gradient reaches them, so their branches "
            "are not measured; leave them out with exclude="
        )
    for name, sum_of in sums.items():
        if not all(np.isfinite(x).all() for x in sum_of.values()):
            raise ValueError(
                f"layer {name!r} cannot be fitted: the sums over its rows are not finite; look at "
                "the inputs"
            )
    if short := [
        n for n, sum_of in sums.items() if np.any(sum_of["count"] < sum_of["xx"].shape[-1])
    ]:
        warnings.warn(
            f"{', '.join(short)}: the batch has fewer rows than the layer has inputs, so errors "
            "say nothing about other inputs; give a larger batch",
            stacklevel=2,
        )
    errors = {}

    def fitted(layer: Layer) -> tuple[Any, Any]:
        xx, xv, vv = (np.asarray(sums[layer.name][k], np.float64) for k in ("xx", "xv", "vv"))
        rcond = xx.shape[-1] * np.finfo(sums[layer.name]["xx"].dtype).eps
        solved = np.linalg.pinv(xx, rcond=rcond, hermitian=True) @ xv
        residual = vv - 2 * (solved * xv).sum((-2, -1)) + (solved * (xx @ solved)).sum((-2, -1))
        some = np.where(vv > 0, vv, 1)
        errors[layer.name] = np.asarray(np.sqrt(np.maximum(residual, 0) / some))
        if not ones[layer.name]:
            return solved, None
        return solved[..., :-1, :], solved[..., -1:, :]

    return ApproximateMerge(_written(adapted, params, adapters, inputs, fitted), errors)


def _written(
    adapted: Adapted,
    params: ArrayTree,
    adapters: Adapters,
    inputs: ArrayTree,
    change: Callable[[Layer], tuple[Any, Any]],
) -> ArrayTree:
    """Add the changes to kernels and biases, and replace parameters that were trained in full."""
    own_adapters = only_adapters(adapters)
    if quantised := sorted(encoded_paths(params)):
        raise ValueError(
            f"{', '.join(quantised)} are quantised, and a kernel with the branch added would have "
            "to be rounded again: merge into jk.nf4.dequantize(params), and quantise the result "
            "if you must"
        )
    params = adapted.separated(params, list(adapters))
    leaves = leaves_by_path(params) | {p: x for p, x in adapters.items() if p not in own_adapters}
    every = adapted.traced(params, inputs, None)
    for name in own_adapters:
        layer = every.table[name]
        _check_mergeable(layer, every.table.layers)
        if any(use.view.history.scaled for use in every.uses_of(layer)):
            raise ValueError(
                f"layer {name!r} cannot be merged: the program multiplies its parameter by a "
                "constant before it is used, and the branch is not multiplied"
            )
        kernel, bias = change(layer)
        for matrix, delta in ((layer.weight, kernel), (layer.bias, bias)):
            if matrix is not None and delta is not None:
                leaf = jnp.asarray(leaves[matrix.path])
                wide = statistics_dtype(leaf.dtype)
                new = matrix.read(leaf).astype(wide) + jnp.asarray(delta, wide)
                leaves[matrix.path] = matrix.write(leaf, new)
    return adapted.tied_again(with_leaves(params, leaves))


def _check_mergeable(layer: Layer, every: tuple[Layer, ...]) -> None:
    path, index = layer.weight.path, layer.weight.index
    for other_layer in every:
        n = min(len(index), len(other_layer.weight.index))
        is_shared = other_layer.weight.path == path and other_layer.weight.index[:n] == index[:n]
        if is_shared and other_layer.name != layer.name:
            raise ValueError(
                f"layer {layer.name!r} cannot be merged: its parameter is also read as "
                f"{other_layer.name!r}, which would change with it"
            )


def _matrix(vjp: LayerVjp, side: Rows) -> Array:
    """Values as ``(stack..., rows, features)``, with features in the parameter's own order."""
    x = side.x.transpose(*side.batch, *side.rows, *side.feature_axes)
    x = in_own_order(vjp, side, x, lead=len(side.batch) + len(side.rows))
    return x.reshape(*x.shape[: len(side.batch)], -1, x.shape[-1])


# ---------------- adding a nonlinearity to plain LoRA


def as_fourier(
    adapters: Adapters,
    config: Config,
    *,
    sigma: float,
    fourier_placement: Literal["output", "bottleneck"] = "output",
) -> tuple[Adapters, Config]:
    r"""Give plain LoRA a trainable nonlinearity that starts close to linear.

    $\varphi(z) = \sigma \tanh(z / \sigma) = z - z^3 / 3\sigma^2 + \ldots$: the relative error is
    $(z/\sigma)^2 / 3$, which is below float32's rounding for $\sigma > 3000\,|z|$, where $\varphi$
    also has almost no gradient. The coefficients start at $[0, \sigma + 10^{-6}, 0, 0]$, so
    ``fourier_loss``, the distance from $[0, 1, 0, 0]$, is large at first and pulls on $c_1$.

    Args:
        adapters: Plain LoRA, for example from :func:`load`.
        config: Its settings.
        sigma: Initial $\sigma$, in units of $z$: several times its root mean square.
        fourier_placement: See :class:`Config`.

    Returns:
        ``(adapters, config)``.

    Raises:
        ValueError: the adapters already have a nonlinearity, or sigma is not positive.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> plain = {"kernel": lslora.Adapter(jnp.ones((3, 2)), jnp.ones((2, 3)), None, None)}
        >>> config = lslora.Config(rank=2, fourier_placement="none")
        >>> adapters, config = lslora.as_fourier(plain, config, sigma=8.0)
        >>> adapters["kernel"].coefficients.shape, config.fourier_placement
        ((4,), 'output')
    """
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma={sigma}: expected a positive number")
    nonlinear = [name for name, x in only_adapters(adapters).items() if not x.is_linear]
    if nonlinear:
        raise ValueError(f"{', '.join(nonlinear)} have a nonlinearity already")
    out = dict(adapters)
    for name, adapter in only_adapters(adapters).items():
        stack, wide = adapter.a.shape[:-2], statistics_dtype(adapter.a.dtype)
        first = jnp.asarray([c * (sigma + EPSILON) for c in FOURIER.initial], wide)
        out[name] = adapter._replace(
            coefficients=jnp.broadcast_to(first, (*stack, *first.shape)),
            sigma=jnp.full(stack, sigma, wide),
        )
    new = dataclasses.replace(
        config,
        nonlinearity=FOURIER.name,
        fourier_placement=fourier_placement,
        init_sigma=sigma,
    )
    return out, new
