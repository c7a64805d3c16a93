"""Shards: the body of a ``shard_map`` sees one shard of an array, like a slice in a loop.

The devices are the columns of ``_loops``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkfac._jaxpr_compat import Eqn, body_of
from jaxkfac.interception._plan import Plan
from jaxkfac.interception.coupling._labels import (
    FREE,
    Labels,
    check_size,
    joined,
    reduced,
    simplified,
)
from jaxkfac.interception.coupling._loops import Follows, slices_of
from jaxkfac.interception.coupling._values import (
    QUESTIONS,
    LabeledValue,
    Reason,
    rank_of,
)

# Collectives whose results keep each entry at its position; all others move entries along an axis.
_IN_PLACE = frozenset("psum psum2 psum_invariant pmax pmin ppermute".split())


def shard_map(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a program that each device runs on its shards."""
    body, consts = body_of(eqn)
    p = eqn.params
    sizes = dict(p["mesh"].shape)
    split = [_divided(spec, rank_of(v)) for spec, v in zip(p["in_specs"], eqn.invars, strict=True)]
    names = list(dict.fromkeys(n for dims in split for axes in dims for n in axes))
    # A result may be divided along an axis over which no operand is, as after `axis_index`.
    names += [n for spec in p["out_specs"] for n in _names(spec) if n not in names]
    devices = [dict(zip(names, at, strict=True)) for at in np.ndindex(*[sizes[n] for n in names])]
    labels = [
        None
        if (array_labels := x.of(q).labels) is None
        else _shards(array_labels, dims, devices, sizes)
        for x, dims in zip(ins, split, strict=True)
        for q in QUESTIONS
    ]
    # Devices are treated like the iterations of a scan: one run of the body stands for all of them.
    columns, inside = slices_of(follower, ins, labels)
    follower.shards.append(columns)
    try:
        outs = follower.run(body, consts, inside, plan)
    finally:
        follower.shards.pop()
    reason, results = Reason(True, "at `shard_map`"), []
    for out, var, spec in zip(outs, eqn.outvars, p["out_specs"], strict=True):
        dims, shape = _divided(spec, rank_of(var)), var.aval.shape

        def gathered(labels: Labels, dims: Any = dims, shape: Any = shape) -> Labels:
            return _gathered(columns.stacked(labels), dims, devices, sizes, shape)

        results.append(out.with_labels(gathered, reason=reason))
    return results


def _names(spec: Any) -> list[str]:
    return [n for axis in spec if axis for n in (axis if isinstance(axis, tuple) else (axis,))]


def _divided(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """For each axis, the mesh axes that divide it."""
    axes = [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]
    return [*axes, *[()] * (rank - len(axes))]


def _shard_index(
    axes: tuple[str, ...], device: dict[str, int], sizes: dict[str, int]
) -> tuple[int, int]:
    """The index of a device's shard along an axis, and the number of shards."""
    at, number = 0, 1
    for name in axes:
        at, number = at * sizes[name] + device[name], number * sizes[name]
    return at, number


def _shards(
    labels: np.ndarray, dims: Any, devices: Sequence[dict[str, int]], sizes: dict[str, int]
) -> np.ndarray:
    shards = []
    for device in devices:
        shard = labels
        for d, axes in enumerate(dims):
            at, number = _shard_index(axes, device, sizes)
            # Labels of length one stand for the full axis, and for each part of it.
            if shard.shape[d] > 1:
                size = shard.shape[d] // number
                shard = shard.take(range(at * size, (at + 1) * size), d)
        shards.append(shard)
    return np.stack(shards)


def _gathered(
    stacked: Labels,
    dims: Any,
    devices: Sequence[dict[str, int]],
    sizes: dict[str, int],
    shape: Sequence[int],
) -> Labels:
    """Labels of the full array from those of the devices' shards."""
    if stacked is None:
        return None
    split = [d for d, axes in enumerate(dims) if axes]
    if len(stacked) == 1 and all(stacked.shape[1 + d] == 1 for d in split):
        return stacked[0]
    stacked = np.broadcast_to(stacked, (len(devices), *stacked.shape[1:]))
    spread = [s if d in split else n for d, (s, n) in enumerate(zip(shape, stacked.shape[1:]))]
    check_size(spread)
    full_labels = np.full(spread, FREE, np.int32)
    for shard, device in zip(stacked, devices, strict=True):
        at: list[Any] = [slice(None)] * len(shape)
        for d in split:
            position, number = _shard_index(dims[d], device, sizes)
            size = shape[d] // number
            at[d] = slice(position * size, (position + 1) * size)
        before = full_labels[tuple(at)]  # from another device, if the axis is replicated over some
        full_labels[tuple(at)] = joined(before, np.broadcast_to(shard, before.shape))
    return simplified(full_labels)


def collective(
    follower: Follows, eqn: Eqn, ins: Sequence[LabeledValue], plan: Plan | None
) -> list[LabeledValue]:
    """The results of a collective, which reads everything that differs between devices.

    ``vmap(axis_name=)`` turns a collective into a sum over an axis of the operand.
    """
    summed = [a for a in eqn.params.get("axes", ()) if isinstance(a, int)]
    name, moves = eqn.primitive.name, eqn.primitive.name not in _IN_PLACE

    def change(labels: Labels, rank: int) -> Labels:
        labels = reduced(labels, summed)
        for columns in follower.shards:
            # What differs between devices is mixed, because a collective reads it from all of them.
            labels = columns.carried(labels)
        if labels is not None and summed:
            labels = labels.squeeze(tuple(summed))
        # `all_gather`, `all_to_all` and the like also move entries along an axis, so no entry keeps
        # its label.
        if labels is not None and (labels.ndim != rank or moves):
            labels = reduced(labels, range(labels.ndim)).reshape((1,) * rank)
        return labels

    return [
        ins[min(k, len(ins) - 1)].with_labels(
            functools.partial(change, rank=rank_of(var)), reason=Reason(True, f"at `{name}`")
        )
        for k, var in enumerate(eqn.outvars)
    ]
