"""First values of A from what a layer sees: its inputs' covariance (EVA), or the gradient."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxkfac._checks import instance_of
from jaxkfac._errors import NonFiniteFactorError, UnknownLayerError, nearest
from jaxkfac.factors import Factors
from jaxkfac.interception import Layer, leaves_by_path

Init = Literal["default", "eva", "gradient"]
_NAMES = {"eva": "factors", "gradient": "gradient"}
_ROUNDING = 1e-6  # relative to the largest: what float32 sums of squares tell from zero


def check_source(init: Init, factors: Factors | None, gradient: PyTree) -> None:
    """Refuse a source that ``init`` does not read, and a missing one.

    Raises:
        ValueError: naming the argument.
        TypeError: ``factors`` are none.
    """
    given = {"factors": factors, "gradient": gradient}
    needed = _NAMES.get(init)
    if needed is not None and given[needed] is None:
        raise ValueError(f"init={init!r} reads the {needed}: pass {needed}=")
    for name, value in given.items():
        if value is not None and name != needed:
            raise ValueError(f"{name}=: init={init!r} does not read it")
    if factors is not None:
        instance_of("factors", factors, Factors, "as jk.value_grad_and_factors gives them")


def covariance(factors: Factors, layer: Layer) -> Any:
    r"""$\sum_n (x_n - \bar x)(x_n - \bar x)^\top$ of a layer's inputs, ``(stack..., in, in)``.

    The mean is known where the factor has the ones of a bias; elsewhere it counts as zero.
    """
    if layer.name not in factors:
        raise UnknownLayerError(
            f"factors: no layer {layer.name!r}, which gets an adapter; the nearest names are "
            f"{nearest(layer.name, factors)}"
        )
    sums = factors.a_sums[layer.input]
    xp: Any = jnp if isinstance(sums, Tracer) else np
    if xp is np:
        sums = np.asarray(sums, np.float64)
    if not factors.layer(layer.name).a_dense:
        sums = sums[..., None] * xp.eye(sums.shape[-1], dtype=sums.dtype)
    if factors.has_ones(layer.input):
        row, ones = sums[..., :-1, -1], sums[..., -1:, -1]
        mean = row / xp.where(ones > 0, ones, 1)
        sums = sums[..., :-1, :-1] - mean[..., :, None] * row[..., None, :]
    if sums.shape != (expected := (*layer.stack, layer.in_features, layer.in_features)):
        raise ValueError(
            f"factors: A of layer {layer.name!r} has shape {sums.shape}, expected {expected}: they "
            "are of another model"
        )
    return sums


def gradient_of(gradient: PyTree, layer: Layer) -> Any:
    """The gradient of a layer's matrix, ``(stack..., in, out)``."""
    leaves, path = leaves_by_path(gradient), layer.weight.path
    if path not in leaves:
        raise ValueError(
            f"gradient: no leaf {path!r}, which gets an adapter; the nearest paths are "
            f"{nearest(path, leaves)}"
        )
    found = layer.weight.read(jnp.asarray(leaves[path]))
    return found if isinstance(found, Tracer) else np.asarray(found, np.float64)


def directions(
    init: Init, layer: Layer, rank: int, factors: Factors | None, gradient: PyTree
) -> Float[Array, "*stack in r"]:
    """Orthonormal columns, the strongest first, each with its largest entry positive.

    Raises:
        ValueError: fewer directions than the rank, where values are known.
        NonFiniteFactorError: values that are not finite.
    """
    what = "inputs" if init == "eva" else "gradient"
    if init == "eva":
        assert factors is not None
        matrix = covariance(factors, layer)
    else:
        matrix = gradient_of(gradient, layer)
    traced = isinstance(matrix, Tracer)
    if not traced and not np.isfinite(matrix).all():
        raise NonFiniteFactorError(f"layer {layer.name!r}: the {what} are not finite")
    xp: Any = jnp if traced else np
    left, values, _ = xp.linalg.svd(matrix, full_matrices=False)
    if not traced:
        number = int((values > _ROUNDING * values.max(-1, keepdims=True)).sum(-1).min())
        if number < rank:
            raise ValueError(
                f"layer {layer.name!r}: the {what} have {number} directions"
                + (" in one of the slices" if layer.stack else "")
                + f", and the rank is {rank}: give more examples, or a lower rank (rank_pattern=)"
            )
    left = left[..., :rank]
    largest = xp.take_along_axis(left, xp.abs(left).argmax(-2)[..., None, :], -2)
    return jnp.asarray(left * xp.where(largest < 0, -1, 1))
