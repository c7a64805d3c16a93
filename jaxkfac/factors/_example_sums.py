"""Statistics of whole examples: rows summed over the positions of each (``sharing="reduce"``).

Cotangents of a slot add up over the uses of a parameter and the iterations of a scan, so what
arrives is each example's sum over all of them; outer products and squares are formed after.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkfac.factors._taps import ArrayType
from jaxkfac.interception import Atoms, Layer, Site, Use
from jaxkfac.kinds import Rows, by_example, in_own_order
from jaxkfac.linalg import PANELS_FROM, gram, gram_panels, unpack_panels


def example_sums(
    site: Site, use: Use, side: Rows, examples: Atoms, like: ArrayType
) -> Float[Array, "*stack examples n"]:
    """Rows summed over the positions of each example, ``(stack..., examples, features)``."""
    x = by_example(site, side, use.rows, examples, path=use.view.path)
    total = x.sum(1, dtype=like.dtype)
    lead = 1 + len(side.batch)
    total = in_own_order(site, use, side, total, lead=lead)
    return jnp.broadcast_to(jnp.moveaxis(total, 0, lead - 1), like.shape)


def example_counts(
    site: Site,
    use: Use,
    side: Rows,
    weights: Bool[Array, "..."] | None,
    examples: Atoms,
    like: ArrayType,
) -> Float[Array, "*stack examples"]:
    """The number of positions of each example, ``(stack..., examples)``."""
    if weights is None:
        return jnp.full(like.shape, side.number // like.shape[-1], like.dtype)
    every = Rows(weights, tuple(range(weights.ndim)), (), ())
    counts = by_example(site, every, use.rows, examples, path=use.view.path)
    return jnp.broadcast_to(counts.sum(1, dtype=like.dtype), like.shape)


def input_means(
    a_rows: Float[Array, "*stack examples n"],
    a_numbers: Float[Array, "*stack examples"],
    *,
    ones: bool,
    dense: bool,
) -> tuple[Float[Array, "*sums"], Float[Array, "*stack"]]:
    """Sum of outer products of each example's mean input row, and the number of examples."""
    there = a_numbers > 0
    mean = a_rows / jnp.where(there, a_numbers, 1)[..., None]
    if ones:
        mean = jnp.concatenate([mean, there[..., None].astype(mean.dtype)], -1)
    return outer_products(mean, dense=dense), there.sum(-1, dtype=mean.dtype)


def outer_products(rows: Float[Array, "*stack rows n"], *, dense: bool) -> Float[Array, "*sums"]:
    """``(stack..., rows, n)`` to ``(stack..., n, n)``, or to its diagonal."""
    lead = rows.ndim - 2
    if not dense:
        return jnp.square(rows).sum(-2)
    if not lead and rows.shape[-1] >= PANELS_FROM:
        return unpack_panels(gram_panels(rows, 1))
    return gram(rows, (lead,), tuple(range(lead)))


def gradient_block(
    layer: Layer, gradient: Float[Array, "*parameter examples"]
) -> Float[Array, "*stack n n"]:
    """The dense block of per-example gradients ``(parameter..., examples)``."""
    return outer_products(gradient_rows(layer, gradient), dense=True)


def gradient_rows(
    layer: Layer, gradient: Float[Array, "*parameter examples"]
) -> Float[Array, "*stack examples n"]:
    """Gradients ``(parameter..., examples)`` of a scale or bias as ``(stack..., examples, n)``."""
    weight = dataclasses.replace(layer.weight, index=())
    rows = jax.vmap(weight.read, in_axes=-1, out_axes=-2)(gradient)
    return rows.reshape(*layer.stack, -1, layer.out_features)
