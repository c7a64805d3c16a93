"""Deliberate faults in jaxkfac, and for each the cases that must notice it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxkfac as jk
from jaxkfac import lslora
from jaxkfac.curvature import _layer_power
from jaxkfac.factors import _loss_terms
from jaxkfac.factors._fisher import MonteCarlo
from jaxkfac.interception import ParameterMatrix
from jaxkfac.kinds import _moments, _rows, _two_sided
from jaxkfac.lslora import _branch, _nonlinearity
from jaxkfac.lslora._nonlinearity import Fourier
from jaxkfac.optim import _multi_steps

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: What is wrong.
        inject: Puts it into the library; the patch takes it out again.
        caught_by: ``(part, name, problem)`` of the cases that must fail, in float64 on the CPU.
    """

    name: str
    inject: Callable[[Patch], None]
    caught_by: tuple[tuple[str, str, str], ...]


def _wrap(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, *its arguments)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


# ---------------------------------------------------------------- the faults


def transposed_kernel(patch: Patch) -> None:
    """Square kernels are read (out, in)."""

    def read(original: Any, matrix: Any, leaf: Any) -> Any:
        found = original(matrix, leaf)
        return found.mT if found.shape[-1] == found.shape[-2] else found

    _wrap(patch, ParameterMatrix, "read", read)


def missing_ones(patch: Patch) -> None:
    """The last row and column of a joint A are zero."""

    def item(original: Any, factors: jk.Factors, name: str) -> Any:
        found = original(factors, name)
        if isinstance(found, jk.DiagonalFactor) or not factors.wants_ones(factors.layer(name)):
            return found
        return found._replace(a=found.a.at[..., -1, :].set(0).at[..., :, -1].set(0))

    _wrap(patch, jk.Factors, "__getitem__", item)


def padding_counted(patch: Patch) -> None:
    """DeferredParameter rows are in no sum, but they are in the count."""

    def moments(original: Any, vjp: Any, slot: Any, side: Any, weights: Any, products: Any) -> Any:
        out = original(vjp, slot, side, weights, products)
        return dataclasses.replace(out, count=jnp.full_like(out.count, side.number))

    _wrap(patch, _two_sided, "input_moments", moments)


def padding_summed(patch: Patch) -> None:
    """DeferredParameter rows are in the sums."""
    patch.setattr(_rows.Rows, "masked", lambda side, weights: side)


def float16_sums(patch: Patch) -> None:
    """Rows are multiplied and summed in half precision."""

    def gram(original: Any, x: Any, rows: Any, batch: Any = (), **options: Any) -> Any:
        half, numbers = x.astype(jnp.float16), (tuple(rows), tuple(rows))
        found = jax.lax.dot_general(half, half, (numbers, (tuple(batch), tuple(batch))))
        return found.astype(original(x, rows, batch, **options).dtype)

    _wrap(patch, _moments, "gram", gram)


def clipped_vectors(patch: Patch) -> None:
    """Eigenvectors of raised eigenvalues are dropped."""

    def spectra(original: Any, bases: jk.Eigenbases, layer: Any) -> Any:
        def drop(spectrum: Any) -> Any:
            if spectrum.vectors is None:
                return spectrum
            least = spectrum.values.max(-1, keepdims=True) / bases.max_condition
            kept = (spectrum.values >= least)[..., None, :]
            return spectrum._replace(vectors=jnp.where(kept, spectrum.vectors, 0))

        return tuple(map(drop, original(bases, layer)))

    _wrap(patch, jk.Eigenbases, "spectra", spectra)


def dropped_scale(patch: Patch) -> None:
    """G keeps the gradients of the mean loss."""

    def item(original: Any, factors: jk.Factors, name: str) -> Any:
        found = original(factors, name)
        if isinstance(found, jk.DiagonalFactor):
            return found
        return found._replace(g=found.g / jnp.square(factors.terms.astype(found.g.dtype)))

    _wrap(patch, jk.Factors, "__getitem__", item)


def swapped_dampings(patch: Patch) -> None:
    """The damping of A goes to G, and that of G to A."""

    def power(original: Any, *args: Any, damping: Any = 0.0, **options: Any) -> Any:
        return original(
            *args, damping=damping[::-1] if isinstance(damping, tuple) else damping, **options
        )

    _wrap(patch, _layer_power, "kronecker_power", power)


def reordered_patches(patch: Patch) -> None:
    """The axes of a patch are flattened in another order, as PyTorch's is not Flax's."""

    def moments(original: Any, side: Any, precision: Any) -> Any:
        found, n = original(side, precision), len(side.feature_axes)
        lead = found.ndim - 2 * n
        rolled = [(i + 1) % n for i in range(n)]
        order = [*range(lead), *(lead + i for i in rolled), *(lead + n + i for i in rolled)]
        return found.transpose(order).reshape(found.shape)

    _wrap(patch, _moments, "sum_over_patches", moments)


def reordered_wide_patches(patch: Patch) -> None:
    """The axes of a patch are flattened in another order, where A is computed by panels."""

    def product(original: Any, x: Any, axis: int, **options: Any) -> Any:
        channels = x.shape[axis] // 9
        order = jnp.arange(x.shape[axis]).reshape(9, channels).T.reshape(-1)
        return original(jnp.take(x, order, axis), axis, **options)

    _wrap(patch, _moments, "symmetric_gram", product)


def equal_weights(patch: Patch) -> None:
    """Micro-batches weigh alike, however many terms they have."""

    def sums(original: Any, grads: Any, factors: Any, count: Any, dtype: Any) -> Any:
        return original(grads, factors, jnp.ones_like(count), dtype)

    _wrap(patch, _multi_steps, "_sums", sums)


def undecayed_counts(patch: Patch) -> None:
    """An average decays its sums and not its counts."""

    def average(original: Any, old: jk.Factors, new: jk.Factors, decay: Any) -> Any:
        found = original(old, new, decay)
        counts = jax.tree.map(jnp.add, old.a_counts, new.a_counts)
        return dataclasses.replace(found, a_counts=counts, terms=old.terms + new.terms)

    _wrap(patch, jk, "update_average", average)


def ignored_labels(patch: Patch) -> None:
    """The sampled Fisher takes the given targets."""

    def expectation(original: Any, self: Any, objective: Any, outputs: Any, batch: Any, of: Any):
        labels = jnp.broadcast_to(batch.targets, self.labels.shape)
        return original(dataclasses.replace(self, labels=labels), objective, outputs, batch, of)

    _wrap(patch, MonteCarlo, "expectation", expectation)


def targets_read_under_the_mask(patch: Patch) -> None:
    """Targets without a loss term are computed with before the mask drops their terms."""
    patch.setattr(_loss_terms, "kept_targets", lambda targets, mask: targets)


# ---------------------------------------------------------------- of the adapter


def unscaled_branch(patch: Patch) -> None:
    """The branch is not multiplied by alpha / r."""
    patch.setattr(lslora.Config, "scaling", lambda config, layer: 1.0)


def unbounded(patch: Patch) -> None:
    """The nonlinearity reads z over sigma without its tanh."""
    patch.setattr(Fourier, "argument", lambda phi, u: u)


def swapped_scalars(patch: Patch) -> None:
    """The gradients of the sine's and the cosine's coefficient change places."""

    def swapped(original: Any, phi: Any, x: Any, c: Any, cotangent: Any) -> Any:
        du, (d0, d1, by_sine, by_cosine) = original(phi, x, c, cotangent)
        return du, (d0, d1, by_cosine, by_sine)

    _wrap(patch, Fourier, "derivative", swapped)


def signed_sigma(patch: Patch) -> None:
    """Sigma counts with its sign."""

    def width(original: Any, sigma: Any, z: Any, may_be_linear: bool = False) -> Any:
        return original(sigma, z, may_be_linear) * jnp.sign(_nonlinearity._over(sigma, z))

    _wrap(patch, _branch, "width", width)


def other_placement(patch: Patch) -> None:
    """The nonlinearity is on the other side of B."""

    def branch(original: Any, site: Any, operands: Any, options: Any) -> Any:
        other = {"output": "bottleneck", "bottleneck": "output"}[options.placement]
        return original(site, operands, dataclasses.replace(options, placement=other))

    _wrap(patch, _branch, "branch", branch)


# ---------------------------------------------------------------- the list

JOINT = "expand, joint bias"
FORWARD = ("adapter forward", "output", "scanned")
BACKWARD = ("adapter backward", "A, B, x, c0 to c3, sigma, output", "scanned")
PLAIN = ("adapter forward", "plain LoRA", "scanned")

FAULTS = [
    Fault(
        "transposed kernel",
        transposed_kernel,
        (("powers", "-1, expand, joint", "classifier"),),
    ),
    Fault("missing ones column", missing_ones, (("factors", JOINT, "regression"),)),
    Fault("wrong count in a mask", padding_counted, (("factors", JOINT, "masked tokens"),)),
    Fault("rows that a mask leaves out", padding_summed, (("factors", JOINT, "masked tokens"),)),
    Fault("float16 accumulation", float16_sums, (("factors", JOINT, "regression"),)),
    Fault(
        "clipped vectors",
        clipped_vectors,
        (
            ("decomposition", "matrices, expand, joint, condition 100, floor 0", "shared"),
            ("natural gradient", "condition 100, joint", "shared"),
        ),
    ),
    Fault(
        "dropped scaling",
        dropped_scale,
        (
            ("factors", JOINT, "regression"),
            ("documented scale", "G of the mean loss", "classifier"),
        ),
    ),
    Fault("swapped dampings", swapped_dampings, (("powers", "-1, expand, joint", "shared"),)),
    Fault("patches in another order", reordered_patches, (("factors", JOINT, "conv1d"),)),
    Fault(
        "wide patches in another order",
        reordered_wide_patches,
        (("factors", "patches computed by panels", "wide patches"),),
    ),
    Fault(
        "micro-batches of equal weight",
        equal_weights,
        (("accumulation", "SGD", "masked tokens"),),
    ),
    Fault("counts that do not decay", undecayed_counts, (("averages", "three steps", "scanned"),)),
    Fault("adapter without its scaling", unscaled_branch, (FORWARD, PLAIN)),
    Fault("phi without its tanh", unbounded, (FORWARD,)),
    Fault("swapped gradients of coefficients", swapped_scalars, (BACKWARD,)),
    Fault("sigma with its sign", signed_sigma, (FORWARD,)),
    Fault(
        "wrong placement",
        other_placement,
        (FORWARD, ("adapter forward", "bottleneck", "scanned")),
    ),
    Fault(
        "targets read under the mask",
        targets_read_under_the_mask,
        (("factors", JOINT, "masked regression"),),
    ),
    Fault("ignored labels", ignored_labels, (("sampled labels", "given to both", "regression"),)),
]
