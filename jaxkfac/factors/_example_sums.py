"""Statistics of whole examples: rows summed over the positions of each (``sharing="reduce"``).

Cotangents of a slot add up over the uses of a parameter and the iterations of a scan, so what
arrives is each example's sum over all of them; outer products and squares are formed after.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkfac._errors import LostRowsError
from jaxkfac.factors._taps import ArrayType
from jaxkfac.interception import Atoms, Layer, Site, Use
from jaxkfac.kinds import Products, Rows, by_example, in_own_order
from jaxkfac.linalg import gram, symmetric_gram

ExampleAxes = Sequence[tuple[Atoms, int]]  # as in ``Traced.example_axes``


def example_sums(
    site: Site, use: Use, side: Rows, examples: ExampleAxes, like: ArrayType
) -> Float[Array, "*stack examples n"]:
    """Rows summed over the positions of each example, ``(stack..., examples, features)``."""
    total = _sums(site, use, side, use.rows, examples, like.dtype)
    lead = 1 + len(side.batch)
    total = in_own_order(site, use, side, total, lead=lead)
    return jnp.broadcast_to(jnp.moveaxis(total, 0, lead - 1), like.shape)


def example_counts(
    site: Site,
    use: Use,
    side: Rows,
    weights: Bool[Array, "..."] | None,
    reached: Bool[Array, "..."] | None,
    examples: ExampleAxes,
    like: ArrayType,
) -> Float[Array, "*stack examples"]:
    """The number of positions of each example, ``(stack..., examples)``.

    ``reached`` says which of them each entry of a stack reads, ``None`` that it reads all.
    """
    if reached is not None:
        there = reached if weights is None else reached & weights
        every = Rows(there, tuple(range(1, there.ndim)), (0,), ())
        counts = _sums(site, use, every, use.rows, examples, like.dtype).T
        rest = (1,) * (len(like.shape) - 2)
        return jnp.broadcast_to(counts.reshape(len(counts), *rest, -1), like.shape)
    if weights is None and len(examples) > 1:
        axes = range(len(use.rows))
        weights = jnp.ones([side.x.shape[side.rows[d]] for d in axes], bool)
    if weights is None:
        return jnp.full(like.shape, side.number // like.shape[-1], like.dtype)
    every = Rows(weights, tuple(range(weights.ndim)), (), ())
    counts = _sums(site, use, every, use.rows, examples, like.dtype)
    return jnp.broadcast_to(counts, like.shape)


def _sums(
    site: Site, use: Use, side: Rows, axes: Sequence[Atoms], examples: ExampleAxes, dtype: Any
) -> Float[Array, "examples ..."]:
    """Rows summed over positions, the examples of all axes one after the other.

    A use has rows for the examples of one axis; those of the others are zero.
    """
    table = site.table
    mine = {a for axis in axes for a in table.atoms(axis)}
    found = [k for k, (atoms, _) in enumerate(examples) if mine & {*table.atoms(atoms)}]
    if len(found) > 1:
        raise LostRowsError(
            f"layer {use.view.path!r}: its rows run over pairs of examples of two "
            "jk.mark_outputs, and statistics of whole examples were asked for: take "
            'sharing="expand" and scales="diagonal", or leave the layer out with layers='
        )
    chosen = found[0] if found else 0
    x = by_example(site, side, axes, examples[chosen][0], path=use.view.path)
    total = x.sum(1, dtype=dtype)
    if len(examples) == 1:
        return total
    sizes = [size for _, size in examples]
    before, after = sum(sizes[:chosen]), sum(sizes[chosen + 1 :])
    return jnp.pad(total, [(before, after), *[(0, 0)] * (total.ndim - 1)])


def input_means(
    a_rows: Float[Array, "*stack examples n"],
    a_numbers: Float[Array, "*stack examples"],
    *,
    ones: bool,
    dense: bool,
    products: Products,
    precision: Any,
) -> tuple[Float[Array, "*sums"], Float[Array, "*stack"]]:
    """Sum of outer products of each example's mean input row, and the number of examples."""
    there = a_numbers > 0
    mean = a_rows / jnp.where(there, a_numbers, 1)[..., None]
    if ones:
        mean = jnp.concatenate([mean, there[..., None].astype(mean.dtype)], -1)
    sums = outer_products(mean, dense=dense, products=products, precision=precision)
    return sums, there.sum(-1, dtype=mean.dtype)


def outer_products(
    rows: Float[Array, "*stack rows n"], *, dense: bool, products: Products, precision: Any
) -> Float[Array, "*sums"]:
    """``(stack..., rows, n)`` to ``(stack..., n, n)``, or to its diagonal."""
    lead = rows.ndim - 2
    if not dense:
        return jnp.square(rows).sum(-2)
    rows, times = products.sampled_examples(rows)
    if lead:
        sums = gram(rows, (lead,), tuple(range(lead)), precision=precision)
    else:
        sums = symmetric_gram(rows, 1, precision=precision)
    return sums if times is None else sums * times.astype(sums.dtype)


def gradient_block(
    layer: Layer,
    gradient: Float[Array, "*parameter examples"],
    products: Products,
    precision: Any,
) -> Float[Array, "*stack n n"]:
    """The dense block of per-example gradients ``(parameter..., examples)``."""
    rows = gradient_rows(layer, gradient)
    return outer_products(rows, dense=True, products=products, precision=precision)


def gradient_rows(
    layer: Layer, gradient: Float[Array, "*parameter examples"]
) -> Float[Array, "*stack examples n"]:
    """Gradients ``(parameter..., examples)`` of a scale or bias as ``(stack..., examples, n)``."""
    weight = dataclasses.replace(layer.weight, index=())
    rows = jax.vmap(weight.read, in_axes=-1, out_axes=-2)(gradient)
    return rows.reshape(*layer.stack, -1, layer.out_features)
