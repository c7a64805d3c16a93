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
        slot = {
            k: unpack_panels(v) if isinstance(v, tuple) else v
            for k, v in emitted[layer.name].items()
        }
        if layer.is_diagonal:
            diagonals[layer.name] = _times_squared(slot["diagonal"], terms)
            continue
        g_sums[layer.name] = _times_squared(slot["g"], terms)
        if layer.input == layer.name:
            a_counts[layer.name] = slot["a_count"]
            a_sums[layer.name] = (
                _border(slot["a"], slot["a_sum"], slot["a_count"]) if "a_sum" in slot else slot["a"]
            )
    return Factors(a_sums, a_counts, g_sums, diagonals, terms, tuple(layers), bias)


def _times_squared(x: Any, terms: Any) -> Any:
    scale = terms.astype(x.dtype)
    return x * scale * scale


@jax.jit  # traced once per shape, not once per layer
def _border(a: Any, total: Any, count: Any) -> Any:
    """The ones column, appended last: ``[[a, total], [total^T, count]]``."""
    if a.ndim == total.ndim:
        return jnp.concatenate([a, count[..., None]], -1)
    right = jnp.concatenate([total, count[..., None]], -1)
    return jnp.concatenate([jnp.concatenate([a, total[..., None, :]], -2), right[..., None]], -1)
