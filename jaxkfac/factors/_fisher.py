"""Fisher types: which cotangents of the outputs are pulled back, and how they are summed."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxkfac.factors._objective import Batch, Objective, check_array
from jaxkfac.linalg._gram import statistics_dtype

Fisher = Literal["empirical", "mc", "exact", "forward", "exact_if_terms_do_not_mix"]
FISHER_TYPES = get_args(Fisher)
LABELS = 0x6C61  # folded into the caller's key for sampled labels


def sum_over_pulls(
    fisher: Fisher,
    objective: Objective,
    outputs: Any,
    batch: Batch,
    contribution: Callable[[Any], Any],
    *,
    key: Any,
    labels: Any,
    samples: int,
    chunk: int,
) -> Any:
    r"""The output sides of a Fisher type that is not the gradient's own.

    ``"mc"`` pulls the gradient of the loss at labels sampled from the model, and takes the
    mean over samples. ``"exact"`` pulls, for each loss term $r$ and each column $c$ of the
    square root of that term's Fisher, the column at $r$ and zero at every other term. The
    shortcut of one pull for each column, shared by all terms, drops the products of
    different terms' columns, and is right only where no output row reads two of them.

    Args:
        fisher: ``"mc"``, ``"exact"`` or ``"exact_if_terms_do_not_mix"``.
        objective: The objective.
        outputs: Outputs of the model.
        batch: The batch.
        contribution: From a cotangent of the outputs, for the *mean* loss, to the summands.
        key: For sampled labels.
        labels: ``(samples, *targets)``, in place of sampled ones, or ``None``.
        samples: How many to sample.
        chunk: How many pulls run at once.

    Memory:
        ``chunk`` times that of one backward pass and its summands, plus their sum.
    """
    terms = number_of_terms(outputs, batch)
    if fisher == "mc":

        def at_labels(targets: Any) -> Any:
            pull = jax.vjp(lambda y: objective.loss(y, targets, batch.mask)[0], outputs)[1]
            return contribution(pull(jnp.ones((), statistics_dtype(outputs.dtype)))[0])

        if labels is not None:
            check_label_values(objective, outputs, labels, batch.mask)
            total, samples = _sum(at_labels, labels, chunk), len(labels)
        else:
            key = jax.random.fold_in(key, LABELS)
            keys = key[None] if samples == 1 else jax.random.split(key, samples)
            total = _sum(lambda k: at_labels(objective.likelihood.sample(k, outputs)), keys, chunk)
        return jax.tree.map(lambda x: x / jnp.asarray(samples, x.dtype), total)

    columns, rows = outputs.shape[-1], math.prod(outputs.shape[1:-1])
    together = fisher == "exact_if_terms_do_not_mix"

    def at_column(index: Any) -> Any:
        column = objective.likelihood.fisher_column(outputs, index % columns)
        kept = jnp.ones(outputs.shape[:-1], bool) if batch.mask is None else batch.mask
        if not together:
            here = (jnp.arange(rows) == index // columns).reshape(outputs.shape[1:-1])
            kept = kept & here
        scaled = over_count(column, terms)
        return contribution(jnp.where(kept[..., None], scaled, jnp.zeros((), scaled.dtype)))

    return _sum(at_column, jnp.arange(columns * (1 if together else rows)), chunk)


def over_count(x: Any, count: Any) -> Any:
    """``x / count`` in the dtype of ``x``; 16 bits do not hold a count."""
    wide = x.astype(statistics_dtype(x.dtype))
    return (wide / count.astype(wide.dtype)).astype(x.dtype)


def number_of_terms(outputs: Any, batch: Batch) -> Any:
    """How many loss terms the mean is over; at least one."""
    dtype = statistics_dtype(outputs.dtype)
    if batch.mask is None:
        return jnp.asarray(math.prod(outputs.shape[:-1]), dtype)
    return jnp.maximum(batch.mask.sum(dtype=dtype), 1)


def check_labels(fisher: Fisher, key: Any, labels: Any, batch: Batch) -> None:
    """Refuse a missing key, and labels that nothing wants or that do not fit."""
    if fisher == "mc" and key is None and labels is None:
        raise ValueError('fisher="mc" samples labels: pass key=, or labels=')
    if labels is None:
        return
    if fisher != "mc":
        raise ValueError(f'labels= are for fisher="mc", and this is fisher={fisher!r}')
    check_array("labels", labels)
    if labels.shape[1:] != batch.targets.shape or not len(labels):
        raise ValueError(
            f"labels have shape {labels.shape}, expected (samples, *targets), "
            f"(samples, {', '.join(map(str, batch.targets.shape))})"
        )


def check_label_values(objective: Objective, outputs: Any, labels: Any, mask: Any) -> None:
    """Refuse labels that the likelihood refuses as targets, where their values are known."""
    if isinstance(labels, Tracer):
        return
    with jax.ensure_compile_time_eval():  # inside a trace a slice of what is known is traced
        each = list(labels)
    for targets in each:
        objective.check(outputs, targets, mask)


def _sum(fn: Callable[[Any], Any], xs: Any, chunk: int) -> Any:
    """Sum of ``fn`` over the leading axis of ``xs``, ``chunk`` entries at a time."""
    number = len(xs)
    chunk = min(chunk, number)
    if number == 1:
        return fn(xs[0])

    def part(xs: Any) -> Any:
        if chunk == 1:
            return fn(xs[0])
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(fn)(xs))

    whole = number - number % chunk
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, xs[0]))
    total, _ = jax.lax.scan(
        lambda total, xs: (jax.tree.map(jnp.add, total, part(xs)), None),
        zeros,
        xs[:whole].reshape(whole // chunk, chunk, *xs.shape[1:]),
    )
    if whole < number:
        rest = jax.tree.map(lambda x: x.sum(0), jax.vmap(fn)(xs[whole:]))
        total = jax.tree.map(jnp.add, total, rest)
    return total
