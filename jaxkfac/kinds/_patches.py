"""The input rows of a convolution: windows of the padded signal, for some positions at a time.

Every output position reads one window, so a kernel of K points makes K copies of the signal
(divided by the product of the strides). Statistics are sums over positions. They are accumulated
over runs of positions, and only the windows of one run exist at a time.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jaxkfac.interception import LayerVjp, Use
from jaxkfac.kinds._rows import ArrayOrShape, Rows
from jaxkfac.linalg import statistics_dtype

# ---------------- examples divided over devices: nothing is summed over devices in a loop


def axis_of_devices(examples: int) -> str | None:
    """The mesh axis over which ``examples`` are divided, or ``None`` if a trace cannot tell.

    It is the only axis with several devices of the mesh in context, provided that the compiler
    partitions along it. With several such axes a trace cannot know which one divides the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    several = [(name, size, kind) for name, size, kind in axes if size > 1]
    match several:
        case [(name, size, AxisType.Auto)] if examples % size == 0:
            return name
    return None


def by_device(x: ArrayOrShape, examples: int, axis: str) -> ArrayOrShape:
    """The axis ``examples`` of an array, split into one shard per device; devices come first."""
    size = jax.sharding.get_abstract_mesh().shape[axis]
    before, after = x.shape[:examples], x.shape[examples + 1 :]
    shards = x.reshape(*before, size, x.shape[examples] // size, *after)
    shards = shards.transpose(examples, *(d for d in range(shards.ndim) if d != examples))
    # Without this, a batch replicated on all devices would make each device compute all sums.
    spec = PartitionSpec(axis, *[PartitionSpec.UNCONSTRAINED] * (shards.ndim - 1))
    return jax.lax.with_sharding_constraint(shards, spec)


# ---------------- patches


AT_ONCE = 2**20  # elements of patches that may always be formed at once: 4 MiB of float32


def patches_of(vjp: LayerVjp) -> Rows:
    """Every patch as a row: ``(groups..., examples, positions..., kernel..., channels)``.

    Args:
        vjp: The convolution; its signal may hold only a few examples.
    """
    return _patches(_signal(vjp), vjp.use)


def summed_patches(vjp: LayerVjp) -> Rows:
    """The patches of ``patches_of`` summed over positions, whose axes keep length one.

    Without a mask the sum over positions is taken axis by axis, and no patch is formed.

    Args:
        vjp: The convolution, with weights ``(examples, positions...)``.
    """
    signal, use = _signal(vjp), vjp.use
    if vjp.weights is None:
        return _patches(signal, use, summed=True)

    def total(side: Rows, exists: ArrayOrShape | None) -> ArrayOrShape:
        dtype = statistics_dtype(side.x.dtype)
        return side.masked(exists).x.sum(side.rows[1:], dtype=dtype, keepdims=True)

    summed = _over_runs(signal, use, vjp.weights, total)
    return _rows(signal, use, summed)


def over_patches(vjp: LayerVjp, statistic: Callable[[Rows, ArrayOrShape | None], Any]) -> Any:
    """The sum of a statistic of patches over runs of positions.

    Args:
        vjp: The convolution, with weights ``(examples, positions...)``.
        statistic: A function from some of the rows, and which of them exist, to a tree of arrays
            that are sums over rows.

    Memory:
        The padded signal and the patches of one run. These are no larger than the largest of half
        the signal, the input factor and ``AT_ONCE`` elements, but at least the patches of one
        position of the longest axis.
    """
    signal, use, weights = _signal(vjp), vjp.use, vjp.weights

    def total(x: ArrayOrShape, exists: ArrayOrShape | None) -> Any:
        of_run = lambda side, exists: statistic(side.masked(exists), exists)
        return _over_runs(signal._replace(x=x), use, exists, of_run)

    lead = len(use.detail.groups)
    several = _run_length(signal, lead + 1) < _longest(signal.axes)[1]
    axis = axis_of_devices(signal.x.shape[lead]) if several else None
    if axis is None:
        return total(signal.x, weights)
    # In a loop each run would be summed over the devices; here they are summed once, after it.
    exists = None if weights is None else by_device(weights, 0, axis)
    shards = jax.vmap(total)(by_device(signal.x, lead, axis), exists)
    return jax.tree.map(lambda x: x.sum(0), shards)


class KernelOrder(NamedTuple):
    """The order in which a convolution reads its kernel.

    Attributes:
        groups: Sizes of the axes in the use's ``axes.stack``.
        reversed: For each spatial axis, whether the kernel is read back to front along it.
    """

    groups: tuple[int, ...]
    reversed: tuple[bool, ...]


class _Axis(NamedTuple):
    """One spatial axis: window ``o`` reads the points ``o * stride + k * dilation``."""

    outputs: int
    size: int
    stride: int
    dilation: int

    def points(self, outputs: int) -> int:
        """The number of points that the windows of consecutive outputs span."""
        return (outputs - 1) * self.stride + (self.size - 1) * self.dilation + 1


class _Signal(NamedTuple):
    """The convolved signal, ``(groups..., examples, padded points..., channels)``."""

    x: ArrayOrShape
    axes: tuple[_Axis, ...]


def _signal(vjp: LayerVjp) -> _Signal:
    eqn, groups = vjp.site.eqn, vjp.use.detail.groups
    p, x, kernel = eqn.params, vjp.operands[0], vjp.operands[1].shape
    numbers = p["dimension_numbers"]
    examples, channels, *spatial = numbers.lhs_spec
    config = [(0, 0, 0)] * x.ndim
    for d, (low, high), spread in zip(spatial, p["padding"], p["lhs_dilation"], strict=True):
        config[d] = (low, high, spread - 1)
    # No copy of the signal where there is nothing to pad.
    if any(c != (0, 0, 0) for c in config):
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
    # Channels last, so that a window's channels are contiguous however the model stores its signal.
    x = x.transpose(examples, *spatial, channels)
    if groups:
        x = x.reshape(*x.shape[:-1], *groups, -1)
        first = range(x.ndim - 1 - len(groups), x.ndim - 1)
        x = jnp.moveaxis(x, list(first), list(range(len(groups))))
    axes = [
        _Axis(eqn.outvars[0].aval.shape[d], kernel[k], stride, dilation)
        for d, k, stride, dilation in zip(
            numbers.out_spec[2:],
            numbers.rhs_spec[2:],
            p["window_strides"],
            p["rhs_dilation"],
            strict=True,
        )
    ]
    return _Signal(x, tuple(axes))


def _patches(signal: _Signal, use: Use, *, summed: bool = False) -> Rows:
    """The windows, or their sums over outputs, formed axis by axis."""
    x, lead = signal.x, len(use.detail.groups) + 1
    for d, axis in enumerate(signal.axes, start=lead):
        windows = []
        # A kernel that is reversed in the program meets the windows back to front; A belongs to the
        # parameter's own order.
        for k in range(axis.size)[:: -1 if use.detail.reversed[d - lead] else 1]:
            first = k * axis.dilation
            last = first + (axis.outputs - 1) * axis.stride
            window = jax.lax.slice_in_dim(x, first, last + 1, axis.stride, d)
            if summed:
                # Sums over many positions would lose digits in 16 bits.
                window = window.sum(d, dtype=statistics_dtype(x.dtype), keepdims=True)
            windows.append(window)
        # The windows go before the channels, so that the kernel's points stack up in the order of
        # its spatial axes.
        x = jnp.stack(windows, -2)
    return _rows(signal, use, x)


def _rows(signal: _Signal, use: Use, x: ArrayOrShape) -> Rows:
    lead, n = len(use.detail.groups), len(signal.axes)
    channels, *spatial = use.axes.inputs
    features = tuple(enumerate((*spatial, channels), start=lead + 1 + n))
    return Rows(x, tuple(range(lead, lead + 1 + n)), tuple(range(lead)), features)


def _over_runs(
    signal: _Signal,
    use: Use,
    weights: ArrayOrShape | None,
    statistic: Callable[[Rows, ArrayOrShape | None], Any],
) -> Any:
    """The sum of a statistic over runs of output positions along the longest axis.

    The axis of examples is not cut, because it may be sharded over devices.
    """
    lead, axes = len(use.detail.groups) + 1, signal.axes
    along, outputs = _longest(axes)
    length = _run_length(signal, lead)

    def statistic_of_run(start: ArrayLike, number: int) -> Any:
        axis = axes[along]._replace(outputs=number)
        x = jax.lax.dynamic_slice_in_dim(
            signal.x, start * axis.stride, axis.points(number), lead + along
        )
        exists = weights
        if exists is not None:
            exists = jax.lax.dynamic_slice_in_dim(exists, start, number, 1 + along)
        run = _Signal(x, (*axes[:along], axis, *axes[along + 1 :]))
        return statistic(_patches(run, use), exists)

    def add(total: Any, start: Int[Array, ""]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, statistic_of_run(start, length)), None

    if length == outputs:
        return statistic(_patches(signal, use), weights)
    number, remainder = divmod(outputs, length)
    # The sum starts from zeros and not from the first run: XLA may keep alive the patches of a run
    # outside the loop, where only a shorter remainder has to be.
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: statistic_of_run(0, length)))
    total, _ = jax.lax.scan(add, zeros, jnp.arange(number) * length)
    return (
        jax.tree.map(jnp.add, total, statistic_of_run(number * length, remainder))
        if remainder
        else total
    )


def _longest(axes: Sequence[_Axis]) -> tuple[int, int]:
    """The axis with the most outputs, and their number."""
    along = max(range(len(axes)), key=lambda d: axes[d].outputs, default=0)
    return along, axes[along].outputs if axes else 1


def _run_length(signal: _Signal, lead: int) -> int:
    """The number of outputs along the longest axis that make a run; see ``over_patches``."""
    shape, axes = signal.x.shape, signal.axes
    window = math.prod(a.size for a in axes) * shape[-1]
    rows = math.prod(shape[:lead]) * math.prod(a.outputs for a in axes)
    factor = math.prod(shape[: lead - 1]) * window**2
    runs = -(-rows * window // max(signal.x.size // 2, factor, AT_ONCE))
    _, outputs = _longest(axes)
    if runs <= 1 or runs >= outputs:
        return outputs if runs <= 1 else 1
    # A number that divides the outputs leaves no shorter run to compile beside the loop.
    even = (n for n in range(runs, min(2 * runs, outputs)) if outputs % n == 0)
    return -(-outputs // next(even, runs))
