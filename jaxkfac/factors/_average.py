"""Running averages of factors."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxkfac._checks import instance_of, named
from jaxkfac._errors import nearest
from jaxkfac.factors._factors import BiasMode, Factors, alike
from jaxkfac.interception import Layer


@runtime_checkable
class OfLayers(Protocol):
    """Something with a block for each layer: factors, eigenbases."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def bias(self) -> BiasMode: ...
    def __iter__(self) -> Iterator[str]: ...


@runtime_checkable
class Measured(Protocol):
    """Sums and counts beside something that stays: corrected eigenbases."""

    def decayed_sum(self, new: Any, decay: ArrayLike) -> Any:
        """``decay`` times the own sums and counts, plus those of ``new``."""
        ...


Average = TypeVar("Average", bound=Factors | Measured)


def zeros_like(shapes: Factors) -> Factors:
    """Factors of nothing: zero sums and zero counts, the neutral element of ``+``.

    Args:
        shapes: Factors, or their shapes as ``stats.factor_shapes`` gives them.

    Returns:
        Factors of the same layers, shapes and dtypes; their means read as 0.
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def update_average(average: Average, factors: Average, decay: ArrayLike) -> Average:
    r"""Advance an exponential average by one step: ``decay * average + factors``.

    Sums and counts decay alike, so the mean read from the result,

    $$ \frac{\sum_t \beta^{T-t} \Sigma_t}{\sum_t \beta^{T-t} n_t}, $$

    is debiased by itself: after the first step it is that step's mean, with no
    $1 - \beta^t$ to divide by, and a step of twice as many rows weighs twice as much. A sum whose
    count is zero is nothing new: its average stays as it is.

    Corrected eigenbases (:func:`correct_eigenvalues`) are averaged alike: their measured
    eigenvalues are, in the eigenvectors of ``average``, in which both must have been measured.

    Args:
        average: The average so far; start from :func:`zeros_like`, or from eigenbases that
            are not corrected yet. Its dtypes are kept.
        factors: This step's factors, or corrected eigenbases. The ``origin`` stays that of
            ``average``, also where they are of another Fisher type; eigenbases that are not
            corrected yet get that of the first measured ones.
        decay: $\beta \in [0, 1)$; may be traced.

    Returns:
        The new average, still sums and counts.

    Raises:
        ValueError: ``decay`` is known and out of range, or the two are of different layers.
        TypeError: one is factors and the other is not.

    Memory:
        One elementwise pass; under ``jit`` with a donated average nothing beyond it.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> params = {"kernel": jnp.ones((3, 2))}
        >>> objective = jk.Objective(lambda p, x: x @ p["kernel"], jk.Gaussian())
        >>> stats, batch = jk.value_grad_and_factors(objective), (jnp.eye(3), jnp.zeros((3, 2)))
        >>> value, grads, factors = stats(params, batch)
        >>> average = jk.update_average(factors, 3.0 * factors, decay=0.5)
        >>> average.terms, average["kernel"].g[0].round(5)
        (Array(10.5, dtype=float32), Array([1., 1.], dtype=float32))
    """
    check_decay(decay)
    if type(average) is not type(factors):
        kinds = f"{type(factors).__name__} to an average of {type(average).__name__}"
        raise TypeError(f"update_average: cannot add {kinds}")
    if not isinstance(average, Factors):
        return average.decayed_sum(factors, decay)
    check_same_layers(cast(Factors, factors), average)
    average, new = alike(average, cast(Factors, factors))
    rows = {name: _decay_of(count, decay) for name, count in new.a_counts.items()}
    sums = {name: _over(beta, new.a_sums[name]) for name, beta in rows.items()}
    terms = _decay_of(new.terms, decay)
    decays = dataclasses.replace(
        new,
        a_sums=sums,
        a_counts=rows,
        g_sums=dict.fromkeys(new.g_sums, terms),
        diagonals=dict.fromkeys(new.diagonals, terms),
        terms=terms,
        loss_terms=None if new.loss_terms is None else _decay_of(new.loss_terms, decay),
        corrections=jax.tree.map(lambda _: terms, new.corrections),
    )
    return jax.tree.map(
        lambda x, beta, y: jnp.asarray(beta, x.dtype) * x + y.astype(x.dtype),
        average,
        decays,
        new,
    )


def _decay_of(count: Any, decay: ArrayLike) -> Array:
    """How much of an average stays beside a contribution: all of it, where that is empty."""
    return jnp.where(count > 0, decay, 1.0)


def _over(beta: Array, total: Any) -> Array:
    """What holds for each entry of a stack, for the matrices of that stack."""
    return beta.reshape(beta.shape + (1,) * (total.ndim - beta.ndim))


def check_decay(decay: Any) -> None:
    """Refuse a decay outside ``[0, 1)`` where its value is known."""
    if isinstance(decay, Tracer):
        return
    if not isinstance(decay, ArrayLike) or np.shape(decay) != ():
        raise TypeError(f"decay: expected a number in [0, 1), got {named(decay)}")
    if not 0 <= float(np.asarray(decay)) < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay}")


def check_like(like: Any) -> None:
    """Refuse a ``like`` that says nothing of factors: parameters, say."""
    remedy = "as stats.factor_shapes(params, batch) gives them"
    instance_of("like", like, Factors, remedy)


def check_factors(factors: Any, expected: OfLayers) -> None:
    """Refuse what are no factors, and factors of other layers than expected."""
    remedy = "as jk.value_grad_and_factors gives them beside value and gradient"
    instance_of("factors", factors, Factors, remedy)
    check_same_layers(factors, expected)


def check_same_layers(factors: OfLayers, expected: OfLayers) -> None:
    """Refuse factors of other layers than expected, naming the first that differs."""
    if factors.layers == expected.layers and factors.bias == expected.bias:
        return
    if factors.bias != expected.bias:
        raise ValueError(f"factors have bias={factors.bias!r}, expected {expected.bias!r}")
    for name in expected:
        if name not in factors:
            raise ValueError(
                f"factors lack the layer {name!r}; the nearest names are {nearest(name, factors)}"
            )
    for name in factors:
        if name not in expected:
            raise ValueError(f"factors have the layer {name!r}, which was not expected")
    other = next((a, b) for a, b in zip(factors.layers, expected.layers, strict=True) if a != b)
    raise ValueError(f"factors hold {other[0]}, expected {other[1]}")
