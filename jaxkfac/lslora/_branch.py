"""The low-rank branch at one product, whatever the order of its operands and axes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxkfac.interception import Atoms, DeferredParameter, Site, Use, cast_varying
from jaxkfac.linalg import statistics_dtype
from jaxkfac.lslora._activation import activation, width
from jaxkfac.lslora._config import Placement
from jaxkfac.lslora._nonlinearity import Nonlinearity
from jaxkfac.lslora._product_axes import Operand, ProductAxes


@dataclasses.dataclass(frozen=True)
class BranchOptions:
    """What is fixed of a branch.

    Attributes:
        phi: The nonlinearity, or ``None``.
        placement: Where the nonlinearity is.
        scaling: What the product of the two low-rank factors is multiplied by.
        may_be_linear: Whether an infinite sigma stands for the identity.
        forward_mode: Whether the branch must be differentiable by ``jvp``.
        dropout: Probability, where there is a key.
        key_impl: Of the key whose data is in the slot.
        uses: Number of each use of the layer, so that each draws its own dropout.
        examples: Atoms of the example axis.
    """

    phi: Nonlinearity | None
    placement: Placement
    scaling: float
    may_be_linear: bool = False
    forward_mode: bool = False
    dropout: float = 0.0
    key_impl: Any = None
    uses: dict[int, int] = dataclasses.field(default_factory=dict)
    examples: Atoms = ()


class Branch(NamedTuple):
    r"""One evaluation.

    Attributes:
        inside: ``x A`` as ``(stack..., rows..., rank)``.
        u: $z / (|\sigma| + \epsilon)$, with $z$ what the nonlinearity is applied to; likewise.
        added: What is added to the product, with its axes.
        width: $|\sigma| + \epsilon$, ready to broadcast; ``None`` without a nonlinearity.
    """

    inside: Array
    u: Array
    added: Array
    width: Array | None

    @property
    def z(self) -> Array:
        """Computed when asked for."""
        return self.u if self.width is None else _scaled(self.u, self.width)


def adapted_product(
    site: Site, operands: list[Operand | DeferredParameter], options: BranchOptions
) -> Array:
    """The product with the branch added, in the product's dtype."""
    base = site.bind(*operands)
    return add(base, branch(site, operands, options).added)


def add(base: Array, added: Array) -> Array:
    """The sum in the wider of the two dtypes, cast back."""
    wide = statistics_dtype(base.dtype, added.dtype)
    if base.dtype == added.dtype:
        return base + added
    return (base.astype(wide) + added.astype(wide)).astype(base.dtype)


def branch(
    site: Site, operands: list[Operand | DeferredParameter], options: BranchOptions
) -> Branch:
    """The branch of a site's only use.

    Raises:
        LostRowsError: adapters are mixed by row, and the rows cannot be told apart by example.
    """
    use, slot = site.uses[0], site.slots[0]
    x = operands[1 - use.operand]
    assert not isinstance(x, DeferredParameter)  # it is the parameter that may be encoded
    slot = jax.tree.map(lambda leaf, x=x: cast_varying(leaf, x), slot)
    if "key" in slot:
        x = _dropped(x, slot["key"], options, use)
    axes = ProductAxes.of(site, use, x, slot.get("index"), options.examples)
    adapter = axes.pick(slot["adapter"], slot.get("index"))
    p = site.eqn.params
    product = {
        "precision": p["precision"],
        "preferred_element_type": p["preferred_element_type"],
    }
    inside = axes.down(x, adapter.a.astype(x.dtype), product)

    def up(h: Array) -> Array:
        return axes.up(h.astype(x.dtype), adapter.b.astype(x.dtype), product)

    curve, c, sigma = options.phi, adapter.coefficients, adapter.sigma
    if curve is None or c is None or sigma is None:
        z = up(_scaled(inside, options.scaling))
        return Branch(inside, z, axes.as_product(z), None)
    wide = width(sigma, inside, options.may_be_linear)

    def phi(u: Array) -> Array:
        infinite = sigma if options.may_be_linear else None
        return activation(curve, u, c, infinite, forward_mode=options.forward_mode)

    # Every scalar multiplies the rank's values, never the outputs': no pass over those is its own.
    if options.placement == "bottleneck":
        u = _scaled(inside, 1 / wide)
        return Branch(inside, u, axes.as_product(up(_scaled(phi(u), options.scaling))), wide)
    u = up(_scaled(inside, options.scaling / wide))
    return Branch(inside, u, axes.as_product(phi(u)), wide)


def _scaled(h: Array, scale: Array | float) -> Array:
    """The product in float32 at the least, so that it is rounded once."""
    return h.astype(statistics_dtype(h.dtype)) * scale


def _dropped(x: Operand, key: Array, options: BranchOptions, use: Use) -> Array:
    """Inverted dropout; experts of one product draw from the first one's key."""
    key = jax.random.wrap_key_data(key.reshape(-1, key.shape[-1])[0], impl=options.key_impl)
    keep = 1 - options.dropout
    mask = jax.random.bernoulli(jax.random.fold_in(key, options.uses[id(use)]), keep, x.shape)
    return jnp.where(mask, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))
