"""Measuring, regularizing and diagnosing the trained coefficients."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxkfac._arguments import ArrayTree
from jaxkfac._text import short_repr
from jaxkfac.interception import Handler, Site
from jaxkfac.lslora._attach import Adapted
from jaxkfac.lslora._bank import Bank
from jaxkfac.lslora._branch import Branch, BranchOptions, add, branch
from jaxkfac.lslora._config import Adapters, nonlinearities, only_adapters
from jaxkfac.lslora._nonlinearity import FOURIER, Nonlinearity, find_nonlinearity, over_width

# ---------------- statistics of every branch, in one backward pass over a batch
#
# As for curvature, the statistics are the cotangents of slots: a scan stacks them, several uses add
# up, and only sums are kept.


# Maps a site, its operands and its branch to sums over rows, with the stacked axes in front.
Statistic = Callable[[Site, list[Any], Branch], PyTree]


def measure(
    adapted: Adapted,
    params: ArrayTree,
    adapters: Adapters,
    inputs: ArrayTree,
    statistic: Statistic,
    like: Mapping[str, ArrayTree],
) -> dict[str, ArrayTree]:
    """Sums of a statistic over a batch.

    Args:
        adapted: The adapted model.
        params: Parameters of the base model.
        adapters: Its adapters.
        inputs: A batch.
        statistic: The statistic to sum.
        like: For each layer, zeros in the form of the statistic, with the layer's stack in front.

    Returns:
        ``{layer: sums}``; zero where no gradient of the outputs reaches a layer.

    Raises:
        ValueError: the batch is empty.
    """
    if any(jnp.shape(x)[:1] == (0,) for x in jax.tree.leaves(inputs)):
        raise ValueError("inputs: expected a batch to measure on, got one without examples")

    def handle(options: Mapping[str, BranchOptions]) -> Handler:
        def handler(site: Site, operands: list[Any]) -> Any:
            base = site.bind(*operands)
            result = branch(site, operands, options[str(site.uses[0].layer)])
            slot = site.slots[0].sums.sums
            sums = jax.tree.map(
                lambda x, s: x.astype(s.dtype).reshape(s.shape),
                statistic(site, operands, result),
                slot,
            )
            return _emit(slot, jax.lax.stop_gradient(sums), add(base, result.added))

        return handler

    def total(extra: Mapping[str, ArrayTree]) -> Any:
        out = adapted.run(params, adapters, inputs, handler=handle, extra=extra)
        floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(x.astype(jnp.float32).sum() for x in floats)

    return jax.grad(total)({name: like[name] for name in only_adapters(adapters)})


@jax.custom_vjp
def _emit(slot: ArrayTree, sums: ArrayTree, out: ArrayTree) -> Any:
    """Return ``out``; the cotangent of ``slot`` is ``sums``, whatever the cotangent of ``out``."""
    return out


def _forward(slot: ArrayTree, sums: ArrayTree, out: ArrayTree) -> tuple[Any, ArrayTree]:
    return out, sums


def _backward(sums: ArrayTree, cotangent: ArrayTree) -> tuple[ArrayTree, ArrayTree, Any]:
    return sums, jax.tree.map(jnp.zeros_like, sums), cotangent


_emit.defvjp(_forward, _backward)


# ---------------- the regularizer of the coefficients


def fourier_loss(adapters: Adapters | Bank) -> Float[Array, ""]:
    r"""Mean over layers of $\frac14 \|c - [0, 1, 0, 0]\|^2$, without the factor ``reg_weight``.

    This is :func:`regulariser` for the Fourier nonlinearity.

    Args:
        adapters: A tree of adapters, or a bank.

    Returns:
        A scalar on the device, in the coefficients' dtype.

    Raises:
        ValueError: no adapter has coefficients, or they belong to another nonlinearity.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([2.0, 1, 0, 0]), jnp.array(1.0))
        >>> float(lslora.fourier_loss({"kernel": adapter}))
        1.0
    """
    return regulariser(adapters, FOURIER.name)


def regulariser(adapters: Adapters | Bank, nonlinearity: str) -> Float[Array, ""]:
    """Mean over layers of the nonlinearity's regularizer, without the factor ``reg_weight``.

    Each slice of a stack (scan, experts) counts as a layer. In a bank, only enabled adapters count;
    plain LoRA has no coefficients and is skipped.

    Args:
        adapters: A tree of adapters, or a bank.
        nonlinearity: Name of the nonlinearity, ``config.nonlinearity``.

    Returns:
        A scalar on the device, in the coefficients' dtype.

    Raises:
        ValueError: no adapter has coefficients, or they belong to another nonlinearity.
    """
    phi = find_nonlinearity(nonlinearity)
    if isinstance(adapters, Bank):
        adapters.check_nonlinearity(nonlinearity)
    tree = adapters.adapters if isinstance(adapters, Bank) else adapters
    distances, weights = [], []
    for name, (c, sigma) in nonlinearities(tree).items():
        phi.check(c.shape, f"layer {name!r}")
        if isinstance(adapters, Bank):
            on = (adapters.enabled > 0) & ~jnp.isinf(sigma)
            c = jnp.where(on[..., None], c, phi.first(c.dtype))  # a disabled slot may hold NaN
            weights.append(jnp.broadcast_to(on, c.shape[:-1]).astype(c.dtype).reshape(-1))
        distances.append(phi.regulariser(c).reshape(-1))
    if not distances:
        raise ValueError("no adapter has coefficients: plain LoRA has no regulariser")
    if not weights:
        return jnp.concatenate(distances).mean()
    weight = jnp.concatenate(weights)
    return (jnp.concatenate(distances) * weight).sum() / jnp.maximum(weight.sum(), 1)


# ---------------- diagnosis: distance from the initial form and from linear


class Diagnosis(NamedTuple):
    r"""The nonlinearity of one layer's adapter; leading axes are the layer's stack.

    The formulas are those of the Fourier nonlinearity; others define their own.

    Attributes:
        coefficients: $c_0 \ldots c_3$.
        sigma: $\sigma$.
        deviation: Mean of $|c - [0, 1, 0, 0]|$, the distance from the initial coefficients.
        nonlinearity: $|c_2| + |c_3|$. At zero a tanh remains.
        saturated: Fraction of a batch's values with $|\hat x| > 0.95$, where tanh has lost nine
            tenths of its slope; ``None`` without a batch, NaN where no gradient reaches the layer.
    """

    coefficients: Float[Array, "*stack k"]
    sigma: Float[Array, "*stack"]
    deviation: Float[Array, "*stack"]
    nonlinearity: Float[Array, "*stack"]
    saturated: Float[Array, "*stack"] | None = None

    __repr__ = short_repr


def diagnose(
    adapters: Adapters,
    adapted: Adapted | None = None,
    params: ArrayTree = None,
    inputs: ArrayTree = None,
    *,
    nonlinearity: str | None = None,
) -> dict[str, Diagnosis]:
    """Diagnose the nonlinearity of every layer, with arrays on the device.

    Args:
        adapters: A tree of adapters; plain LoRA is skipped.
        adapted: From :func:`attach`; needed for the saturated fraction.
        params: The base model; needed with ``adapted``.
        inputs: A batch; needed with ``adapted``, takes one backward pass.
        nonlinearity: Name of the nonlinearity; by default that of ``adapted``, else ``"fourier"``.

    Returns:
        ``{layer: Diagnosis}``.

    Raises:
        ValueError: the batch is empty, or the coefficients belong to another nonlinearity.

    Example:
        >>> import jax.numpy as jnp, jaxkfac.lslora as lslora
        >>> adapter = lslora.Adapter(
        ...     jnp.ones((3, 2)), jnp.ones((2, 3)), jnp.array([0.0, 1, -0.5, 0]), jnp.array(1.0))
        >>> float(lslora.diagnose({"kernel": adapter})["kernel"].nonlinearity)
        0.5
    """
    if nonlinearity is None:
        nonlinearity = FOURIER.name if adapted is None else adapted.config.nonlinearity
    phi = find_nonlinearity(nonlinearity)
    nonlinear, diagnoses = nonlinearities(adapters), {}
    for name, (c, sigma) in nonlinear.items():
        phi.check(c.shape, f"layer {name!r}")
        diagnoses[name] = Diagnosis(
            coefficients=c,
            sigma=sigma,
            deviation=jnp.abs(c - phi.first(c.dtype)).mean(-1),
            nonlinearity=phi.strength(c),
        )
    if adapted is None or not nonlinear:
        return diagnoses
    zeros = {n: jnp.zeros(sigma.shape, jnp.float32) for n, (_, sigma) in nonlinear.items()}
    like = {n: {"saturated": z, "count": z} for n, z in zeros.items()}
    sums = measure(adapted, params, adapters, inputs, _saturated(phi), like)
    return {
        name: one._replace(saturated=sums[name]["saturated"] / sums[name]["count"])
        for name, one in diagnoses.items()
    }


def _saturated(phi: Nonlinearity) -> Statistic:
    def statistic(site: Site, operands: list[Any], branch: Branch) -> dict[str, Array]:
        sigma, z = site.slots[0].constants.adapter.sigma, branch.z
        over = phi.saturated(phi.argument(over_width(sigma, z)))
        total = over.sum(tuple(range(sigma.ndim, z.ndim)), dtype=jnp.float32)
        return {"saturated": total, "count": jnp.full(total.shape, z.size // max(1, total.size))}

    return statistic
