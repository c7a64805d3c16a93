"""Updates on mapped axes: what is reduced, what no single device decides, and equal states."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jaxkfac._arguments import ArrayTree
from jaxkfac._jaxpr_compat import varying_axes
from jaxkfac._mapped_axes import (
    AxisName,
    axes_apart,
    axis_names,
    check_mapped,
    described,
    num_devices,
    sum_over_devices,
    untracked_axes,
)
from jaxkfac.blocks import Factors
from jaxkfac.curvature.operators import Operator
from jaxkfac.factors import BatchCurvature


class Arguments(NamedTuple):
    """The arguments of an update that belong to a batch."""

    grads: ArrayTree
    params: ArrayTree | None
    factors: Any
    value: Any = None
    value_fn: Any = None
    curvature: Any = None


@dataclasses.dataclass(frozen=True)
class MappedAxes:
    """Over which mapped axes an optimizer reduces what it gets.

    Attributes:
        optimizer: Its name, for messages.
        names: ``axis_name=`` of the optimizer; ``()`` if the user reduces by hand, ``None`` if it
            was left out.
        of_like: The axes over which the collector of ``like=`` reduces; counts for an update
            without factors.
    """

    optimizer: str
    names: tuple[str, ...] | None
    of_like: tuple[str, ...] | None

    @classmethod
    def of(cls, optimizer: str, axis_name: AxisName, like: Any) -> "MappedAxes":
        """The axes for the arguments of an optimizer."""
        return cls(optimizer, axis_names(axis_name), _axes_of(like))

    def reduced(self, given: Arguments) -> Arguments:
        """The arguments for the batch of all devices, equal on each of them.

        Raises:
            ValueError: a map around the call has no such axis, or has one that nothing reduces; or
                the curvature is that of one device's batch.
        """
        of_stats = self.of_like if given.factors is None else _axes_of(given.factors)
        if of_stats:
            self._check_reduced(given, of_stats)
            return given
        if self.names:
            check_mapped(f"jk.{self.optimizer}", self.names)
            return _over_devices(given, self.names)
        if self.names is not None or of_stats is not None:
            return given  # () says that it is reduced by hand
        self._check_untracked()
        return self._checked(given)

    def _check_reduced(self, given: Arguments, of_stats: tuple[str, ...]) -> None:
        """Refuse axes that only the optimizer names, and curvature of fewer axes."""
        more = [name for name in self.names or () if name not in of_stats]
        if more:
            raise ValueError(
                f"jk.{self.optimizer}: axis_name= has {more[0]!r}, and value_grad_and_factors has "
                f"axis_name={of_stats!r}: give both the same axes, or the optimizer none"
            )
        axes = getattr(given.curvature, "axes", of_stats)
        if axes != of_stats:
            raise ValueError(
                f"jk.{self.optimizer}: curvature= is that of one device's batch, and gradient and "
                "factors are those of all devices: pass **stats.adaptation(params, batch, key), or "
                f"build it with axis_name={of_stats!r}"
            )

    def _check_untracked(self) -> None:
        """Refuse local numbers that JAX does not track.

        Raises:
            ValueError: naming the axis and the remedies.
        """
        axes = [name for name in untracked_axes() if jax.lax.axis_size(name) > 1]
        if axes:
            raise ValueError(
                f"jk.{self.optimizer}: every device has its own gradient and factors along "
                f"{described(axes[0])}, and would take a step of its own: give "
                "jk.value_grad_and_factors or jk.Optimizer the axis, "
                f"axis_name={_suggested(axes[0])}; or axis_name=() if you have reduced them by hand"
            )

    def _checked(self, given: Arguments) -> Arguments:
        """Refuse a value or curvature that differs between devices whose parameters do not."""
        if not jax.sharding.get_abstract_mesh().manual_axes:
            return given
        apart = _varying(given.grads, given.params)

        def check(what: str, *trees: Any) -> None:
            for name in sorted(_varying(*trees) - apart):
                raise ValueError(
                    f"jk.{self.optimizer}: {what} is that of one device's batch along "
                    f"{described(name)}, and the parameters are equal on all devices: give "
                    "jk.value_grad_and_factors or jk.Optimizer the axis, "
                    f"axis_name={name!r}; or pass what is reduced by hand"
                )

        check("value=", given.value)
        if isinstance(given.curvature, BatchCurvature):
            check("curvature=", given.curvature.batch)
        elif hasattr(given.curvature, "axes"):
            check("curvature=", given.curvature)
        if given.value_fn is None:
            return given

        def value_fn(params: ArrayTree) -> Any:
            value = given.value_fn(params)
            check("the value of value_fn", value)
            return value

        return given._replace(value_fn=value_fn)


def check_reduced(optimizer: str, factors: Factors | None) -> None:
    """Refuse factors of one device alone, for an optimizer that has no ``axis_name=``.

    Raises:
        ValueError: naming the axis and the remedies.
    """
    if factors is not None and _axes_of(factors) is None:
        MappedAxes(optimizer, None, None)._check_untracked()


def _axes_of(factors: Any) -> tuple[str, ...] | None:
    origin = getattr(factors, "origin", None)
    return None if origin is None else origin.axes


def _suggested(name: str) -> str:
    unnamed = described(name) == "the unnamed axis of jax.pmap"
    return '"data", and name it: jax.pmap(step, axis_name="data")' if unnamed else repr(name)


def _varying(*trees: Any) -> frozenset[str]:
    arrays = [x for x in jax.tree.leaves(trees) if hasattr(x, "dtype")]
    return frozenset().union(*map(varying_axes, arrays))


# ---------------- reduction by the optimizer


def _over_devices(given: Arguments, names: tuple[str, ...]) -> Arguments:
    """Reduce what is one device's own: gradients as means weighted by terms, factors as sums."""
    mean = _Mean(_terms(given.factors), names)
    factors = given.factors
    if isinstance(factors, Factors):
        turn, factors = factors.turn, dataclasses.replace(factors, turn=None)
        factors = dataclasses.replace(sum_over_devices(factors, names), turn=turn)
    value, value_fn, curvature = given.value, given.value_fn, given.curvature
    if isinstance(curvature, BatchCurvature):
        curvature = curvature._replace(axes=names)
    elif hasattr(curvature, "axes"):
        curvature = dataclasses.replace(curvature, axes=names)
    elif curvature is not None:
        curvature = MeanOperator(curvature, mean)
    return Arguments(
        grads=jax.tree.map(mean.of_gradient, given.grads),
        params=given.params,
        factors=factors,
        value=None if value is None else mean.of_value(value),
        value_fn=None if value_fn is None else lambda params: mean.of_value(value_fn(params)),
        curvature=curvature,
    )


def _terms(factors: Any) -> Any:
    if not isinstance(factors, Factors):
        return None
    return factors.terms if factors.loss_terms is None else factors.loss_terms


class _Mean(NamedTuple):
    """Means over devices, weighted by their loss terms; without ``terms`` all weigh the same."""

    terms: Any
    names: tuple[str, ...]

    def _weight(self, axes: tuple[str, ...]) -> Any:
        """This device's share of the terms of all devices along some axes."""
        if self.terms is None:
            return 1 / num_devices(axes)
        apart = axes_apart(axes, self.terms)
        total = jax.lax.psum(self.terms, apart) if apart else self.terms
        equal = num_devices(tuple(x for x in axes if x not in apart))
        return self.terms / jnp.where(total == 0, jnp.ones_like(total), total) / equal

    def _weighted(self, x: Any, over: tuple[str, ...]) -> Any:
        weight = jnp.asarray(self._weight(over), jnp.result_type(x))
        # A device without terms counts nothing, and its mean may be 0 / 0.
        term = jnp.where(weight == 0, jnp.zeros_like(x), x * weight)
        return sum_over_devices(term, self.names)

    def of_value(self, x: Any) -> Any:
        """The mean of a value, which is equal on all devices of a tracked axis if it shows so."""
        x = jnp.asarray(x)
        return self._weighted(x, axes_apart(self.names, x))

    def of_gradient(self, x: Any) -> Any:
        """The mean of a gradient, which along a tracked axis is a sum where it does not differ."""
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)):
            return x
        return self._weighted(jnp.asarray(x), self.names)


@dataclasses.dataclass(frozen=True, eq=False)
class MeanOperator(Operator):
    """The mean of the devices' operators.

    Attributes:
        operator: This device's operator.
        mean: How means are taken.
    """

    operator: Operator
    mean: _Mean

    @property
    def like(self) -> ArrayTree:
        return self.operator.like

    def product(self, leaves: dict[str, Array]) -> dict[str, Array]:
        return jax.tree.map(self.mean.of_gradient, self.operator.product(leaves))


# ---------------- whether devices hold the same state


def has_device_axis(x: Any) -> bool:
    """Whether the leading axis of an array has one entry for each device, as under ``jax.pmap``.

    A state of ``jax.vmap`` has its leading axis on one device.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.ndim:
        return False
    rows = x.sharding.shard_shape(x.shape)
    return len(x.sharding.device_set) == x.shape[0] and rows == (1, *x.shape[1:])


def on_first_device(x: Any) -> Any:
    """The entry of the first device of this process, of an array with a device axis."""
    return x.addressable_shards[0].data[0]


_COMPARED = 2**24  # bytes of an array that are compared; devices that part differ everywhere


def parted_leaves(tree: ArrayTree, *, device_axis: bool) -> list[str]:
    """The paths of arrays of which devices should hold the same copy, and do not.

    Arrays that are divided among devices have no copies, and are left out, as are keys. Only copies
    on devices of this process are compared, and of an array above 16 MiB its leading rows.

    Args:
        tree: Arrays with values.
        device_axis: Whether the leading axis of every array has one entry for each device.
    """
    apart = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(x, jax.Array) or len(x.sharding.device_set) < 2:
            continue
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            continue
        if device_axis and not has_device_axis(x):
            continue
        first: dict[str, np.ndarray] = {}
        for shard in x.addressable_shards:
            place = "" if device_axis else str(shard.index)
            copy = _leading_rows(shard.data)
            if not _are_equal(first.setdefault(place, copy), copy):
                apart.append(jax.tree_util.keystr(path))
                break
    return apart


def _leading_rows(x: Array) -> np.ndarray:
    """The values of an array on one device; of a large one, as many rows as 16 MiB hold."""
    if x.nbytes <= _COMPARED:
        return np.asarray(x)
    (device,) = x.sharding.device_set
    # A mesh in context (jax.set_mesh) would have other devices than the copy.
    with jax.set_mesh(jax.sharding.Mesh(np.asarray([device]), ("device",))):
        axis = next(d for d, size in enumerate(x.shape) if size > 1)
        rows = max(1, _COMPARED * x.shape[axis] // x.nbytes)
        return np.asarray(jax.lax.slice_in_dim(x, 0, rows, axis=axis))


def _are_equal(x: np.ndarray, y: np.ndarray) -> bool:
    return x is y or bool(((x == y) | ((x != x) & (y != y))).all())
