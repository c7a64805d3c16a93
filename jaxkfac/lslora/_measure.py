"""Statistics of every branch, in one backward pass over a batch.

Like curvature, they arrive as the cotangents of slots: a scan stacks them, several uses add up,
and nothing is kept but sums.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxkfac.interception import Handler, Site
from jaxkfac.lslora._adapter import Adapters, only_adapters
from jaxkfac.lslora._attach import Adapted
from jaxkfac.lslora._branch import Branch, BranchOptions, add, branch

# From a site, its operands and its branch to sums over rows, with the site's stacked axes first.
Statistic = Callable[[Site, list[Any], Branch], PyTree]


def measure(
    adapted: Adapted,
    params: PyTree,
    adapters: Adapters,
    inputs: Any,
    statistic: Statistic,
    like: Mapping[str, PyTree],
) -> dict[str, PyTree]:
    """Sums of a statistic over a batch.

    Args:
        adapted: The adapted model.
        params: Its base.
        adapters: Its adapters.
        inputs: A batch.
        statistic: What to sum.
        like: For each layer, zeros of the statistic's form with the layer's stack first.

    Returns:
        ``{layer: sums}``; zero where no output depends on a layer.

    Raises:
        ValueError: the batch is empty.
    """
    if any(jnp.shape(x)[:1] == (0,) for x in jax.tree.leaves(inputs)):
        raise ValueError("inputs: expected a batch to measure on, got one without examples")

    def handle(options: Mapping[str, BranchOptions]) -> Handler:
        def handler(site: Site, operands: list[Any]) -> Any:
            base = site.bind(*operands)
            result = branch(site, operands, options[str(site.uses[0].layer)])
            slot = site.slots[0]["extra"]
            sums = jax.tree.map(
                lambda x, s: x.astype(s.dtype).reshape(s.shape),
                statistic(site, operands, result),
                slot,
            )
            return _emit(slot, jax.lax.stop_gradient(sums), add(base, result.added))

        return handler

    def total(extra: Mapping[str, PyTree]) -> Any:
        out = adapted.run(params, adapters, inputs, handler=handle, extra=extra)
        floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(x.astype(jnp.float32).sum() for x in floats)

    return jax.grad(total)({name: like[name] for name in only_adapters(adapters)})


@jax.custom_vjp
def _emit(slot: PyTree, sums: PyTree, out: Any) -> Any:
    """``out``; the cotangent of ``slot`` is ``sums``, whatever that of ``out``."""
    return out


def _forward(slot: PyTree, sums: PyTree, out: Any) -> tuple[Any, PyTree]:
    return out, sums


def _backward(sums: PyTree, cotangent: Any) -> tuple[PyTree, PyTree, Any]:
    return sums, jax.tree.map(jnp.zeros_like, sums), cotangent


_emit.defvjp(_forward, _backward)
