"""Slots of the taps, and what they bring back, as ``Factors``."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkfac.factors._factors import BiasMode, Factors
from jaxkfac.interception._compat import explicit_mesh
from jaxkfac.interception._layer import Layer
from jaxkfac.interception._trace import Traced
from jaxkfac.interception._values import Use
from jaxkfac.linalg._gram import PANELS_FROM, panel_shapes, statistics_dtype, unpack_panels

Slots = dict[str, dict[str, Any]]


def _with_ones(layers: Sequence[Layer], bias: BiasMode) -> set[str]:
    """Names under which an input factor with a ones column is stored."""
    return {layer.input for layer in layers if bias == "joint" and layer.bias is not None}


def empty_slots(traced: Traced, bias: BiasMode) -> Slots:
    """Zeros for every layer; their cotangents are the statistics, and their values unread."""
    uses = collections.defaultdict(list)
    for use in traced.analysis.plan.all_uses():
        if use.layer is not None:
            uses[use.layer].append(use)
    ones = _with_ones(traced.table.layers, bias)
    slots: Slots = {}
    for layer in traced.table.layers:
        mine = uses[layer.name]
        dtype = statistics_dtype(*[v.aval.dtype for u in mine for v in _floats(u)])
        if layer.is_diagonal:
            slots[layer.name] = {"diagonal": jnp.zeros(traced.shapes[layer.weight.path], dtype)}
            continue
        slot = {"g": _side(layer, layer.out_features, layer.g_dense, packs(mine, "g"), dtype)}
        if layer.input == layer.name:
            slot["a"] = _side(layer, layer.in_features, layer.a_dense, packs(mine, "a"), dtype)
            slot["a_count"] = jnp.zeros(layer.stack, dtype)
            if layer.name in ones:
                slot["a_sum"] = jnp.zeros((*layer.stack, layer.in_features), dtype)
        slots[layer.name] = slot
    return slots


def _floats(use: Use) -> list[Any]:
    variables = (*use.eqn.invars, *use.eqn.outvars)
    return [v for v in variables if jnp.issubdtype(v.aval.dtype, jnp.inexact)]


def packs(uses: Sequence[Use], side: str) -> bool:
    """Whether a factor can be gathered in panels: one feature axis in every use, no experts."""
    kinds = ("dense",) if side == "a" else ("dense", "conv", "embedding")
    return all(
        u.kind in kinds
        and not u.batch_axes
        and not u.free_stack
        and len(u.in_axes if side == "a" else u.out_axes) == 1
        and explicit_mesh(u.eqn.outvars[0].aval) is None
        for u in uses
    )


def _side(layer: Layer, size: int, dense: bool, packed: bool, dtype: Any) -> Any:
    if not dense:
        return jnp.zeros((*layer.stack, size), dtype)
    if packed and size >= PANELS_FROM:
        return tuple(jnp.zeros((*layer.stack, *shape), dtype) for shape in panel_shapes(size))
    return jnp.zeros((*layer.stack, size, size), dtype)


def to_factors(
    layers: Sequence[Layer], emitted: Mapping[str, Any], terms: Any, bias: BiasMode
) -> Factors:
    """The cotangents of the slots as sums and counts.

    The taps saw gradients of the *mean* loss; times the number of terms, these are gradients
    of each example's sum, which is what the conventions ask for.
    """
    a_sums, a_counts, g_sums, diagonals = {}, {}, {}, {}
    for layer in layers:
        slot = emitted[layer.name]
        if layer.is_diagonal:
            diagonals[layer.name] = _times_squared(slot["diagonal"], terms)
            continue
        g = jax.tree.map(lambda x: _times_squared(x, terms), slot["g"])
        g_sums[layer.name] = unpack_panels(g) if isinstance(g, tuple) else g
        if layer.input == layer.name:
            a_counts[layer.name] = slot["a_count"]
            a_sums[layer.name] = _input_side(slot)
    return Factors(a_sums, a_counts, g_sums, diagonals, terms, tuple(layers), bias)


def _times_squared(x: Any, terms: Any) -> Any:
    return x * jnp.square(terms.astype(x.dtype))


def _input_side(slot: Any) -> Any:
    """The sum over input rows, with the ones column last where its sum was gathered."""
    a = slot["a"]
    if "a_sum" not in slot:
        return unpack_panels(a) if isinstance(a, tuple) else a
    total, count = slot["a_sum"], slot["a_count"]
    if not isinstance(a, tuple) and a.ndim == total.ndim:  # a diagonal side
        return jnp.concatenate([a, count[..., None]], -1)
    panels, start = [], 0
    for panel in a if isinstance(a, tuple) else (a,):
        stop = start + panel.shape[-2]
        column = total[..., start:stop, None]
        panels.append(jnp.concatenate([panel, column], -1))
        start = stop
    return unpack_panels((*panels, count[..., None, None]))
