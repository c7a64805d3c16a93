"""The Fisher types: which cotangents of the outputs are propagated back, and how they are
summed.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Num, PyTree

from jaxkfac._checks import one_of
from jaxkfac.factors._estimator import LABEL_FOLD, Estimator
from jaxkfac.factors._loss_terms import LossTerms
from jaxkfac.factors._objective import Batch
from jaxkfac.factors._program import Linearised
from jaxkfac.interception import Slot, fast_convolutions, varying_axes
from jaxkfac.linalg import statistics_dtype, sum_over_chunks

Fisher = Literal["empirical", "mc", "exact", "forward", "exact_if_terms_do_not_mix"]


class Empirical(Estimator):
    """The given targets: the gradient's own backward pass."""

    name = "empirical"
    needs_outputs = False

    def gathered(
        self,
        objective: Callable[..., PyTree],
        at: Linearised,
        batch: PyTree,
        outputs: Callable[[Mapping[str, Slot]], PyTree],
    ) -> PyTree:
        if at.own is not None:
            return outputs(at.vjp(at.own()))
        sums, scale = outputs(at.emitted), at.own_scale
        if scale is None:
            return sums
        return jax.tree.map(lambda x: x * scale.astype(x.dtype), sums)

    def expectation(
        self,
        objective: LossTerms,
        outputs: PyTree,
        batch: Batch,
        contribution: Callable[[PyTree], PyTree],
    ) -> PyTree:
        return contribution(objective.scores(outputs, batch.targets, batch.mask))

    @property
    def concurrent(self) -> int:
        return 0


class MonteCarlo(Estimator):
    """Labels sampled from the model, independently for each term: the mean over samples."""

    name = "mc"
    samples_labels = True

    def expectation(
        self,
        objective: LossTerms,
        outputs: PyTree,
        batch: Batch,
        contribution: Callable[[PyTree], PyTree],
    ) -> PyTree:
        def at_labels(targets: PyTree) -> PyTree:
            return contribution(objective.scores(outputs, targets, batch.mask))

        samples, labels = self.samples, self.labels
        if labels is not None:
            samples = len(jax.tree.leaves(labels)[0])
            total = _sum(at_labels, labels, self.chunk)
        else:
            key = of_this_device(jax.random.fold_in(self.key, LABEL_FOLD), outputs)
            keys = key[None] if samples == 1 else jax.random.split(key, samples)
            total = _sum(lambda k: at_labels(objective.sample(k, outputs)), keys, self.chunk)
        return jax.tree.map(lambda x: x / jnp.asarray(samples, x.dtype), total)

    @property
    def concurrent(self) -> int:
        return 0 if self.samples == 1 else self.chunk


class Exact(Estimator):
    r"""The expectation over labels.

    For each loss term $r$ and each column $c$ of the square root of that term's Fisher, the
    column at $r$ and zero at every other term is propagated back: of all examples at once, and
    where examples are coupled (batch statistics), or may be, of one by one.
    """

    name = "exact"

    def expectation(
        self,
        objective: LossTerms,
        outputs: PyTree,
        batch: Batch,
        contribution: Callable[[PyTree], PyTree],
    ) -> PyTree:
        totals, every = [], objective.columns(outputs, batch.mask)
        heads = objective.heads(outputs, None, batch.mask)
        meeting = next(filter(None, (head.meeting() for head in heads)), "")
        if meeting and self.prints:
            number = sum(columns * rows for columns, rows, _ in every)
            remedy = ' (examples="apart" is your word that they do not)' * ("not known" in meeting)
            print(
                f"jaxkfac: {meeting}, so that fisher={self.name!r} takes {number} backward "
                f'passes; "mc" takes one{remedy}',
                file=sys.stderr,
            )
        for columns, rows, column in every:

            def at_column(index: Int[Array, ""], columns=columns, column=column) -> PyTree:
                return contribution(column(index % columns, index // columns))

            totals.append(_sum(at_column, jnp.arange(columns * rows), self.chunk))
        return _added(totals)


class ExactIfTermsDoNotMix(Estimator):
    """One vector-Jacobian product for each column, shared by all terms of an example.

    This drops the products of different terms' columns, and is right only where no output row
    reads two of them.
    """

    name = "exact_if_terms_do_not_mix"
    of_examples = False

    def gathered(
        self,
        objective: Callable[..., PyTree],
        at: Linearised,
        batch: PyTree,
        outputs: Callable[[Mapping[str, Slot]], PyTree],
    ) -> PyTree:
        heads = [] if at.terms_of is None else at.terms_of.heads(at.outputs)
        if meeting := next(filter(None, (head.meeting() for head in heads)), ""):
            raise ValueError(
                f"fisher={self.name!r}: {meeting}, and one product for all of them would mix their "
                'terms: choose "mc" or "exact"'
            )
        return super().gathered(objective, at, batch, outputs)

    def expectation(
        self,
        objective: LossTerms,
        outputs: PyTree,
        batch: Batch,
        contribution: Callable[[PyTree], PyTree],
    ) -> PyTree:
        totals = [
            _sum(lambda i, column=column: contribution(column(i, None)), jnp.arange(n), self.chunk)
            for n, _, column in objective.columns(outputs, batch.mask)
        ]
        return _added(totals)


class Forward(Empirical):
    """G is the identity: the gradient's own backward pass, in which no output is gathered."""

    name = "forward"
    needs_outputs = True
    unit_outputs = True
    of_examples = False


FISHER_TYPES: Mapping[str, type[Estimator]] = {
    cls.name: cls for cls in (Empirical, MonteCarlo, Exact, Forward, ExactIfTermsDoNotMix)
}


def estimator_of(
    fisher: str | Estimator, *, samples: int, chunk: int, of_examples: bool = False
) -> Estimator:
    """The estimator of a Fisher type; one that is given is taken as it is.

    Args:
        fisher: A Fisher type.
        samples: Of the estimator.
        chunk: Of the estimator.
        of_examples: Whether it has to be right for gradients of whole examples.

    Raises:
        ValueError: an unknown name, or a type that is not right for whole examples where it has to
            be; or ``samples`` or ``chunk`` beside an estimator, which has its own.
        TypeError: a field of the estimator has no hash.
    """
    choices = [name for name, cls in FISHER_TYPES.items() if cls.of_examples or not of_examples]
    if isinstance(fisher, Estimator):
        if (samples, chunk) != (1, 1):
            raise ValueError(
                f"samples={samples}, chunk={chunk} beside an Estimator: give them to "
                f"{type(fisher).__name__} itself"
            )
        if of_examples and not fisher.of_examples:
            one_of("fisher", fisher.name, choices)
        _check_hashable(fisher)
        return fisher
    one_of("fisher", fisher, choices)
    return FISHER_TYPES[fisher](samples=samples, chunk=chunk)


def _check_hashable(fisher: Estimator) -> None:
    """Refuse fields that ``jit`` cannot tell apart: all but key and labels are static."""
    for name, value in fisher.tree_flatten()[1]:
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"fisher: {type(fisher).__name__}.{name} is a {type(value).__name__}, which has no "
                "hash, and the fields of an Estimator are static: give a tuple or a number"
            ) from None


def over_count(x: Float[Array, "*shape"], count: Num[Array, ""]) -> Float[Array, "*shape"]:
    """``x / count`` in the dtype of ``x``; 16 bits do not hold a count."""
    wide = x.astype(statistics_dtype(x.dtype))
    return (wide / count.astype(wide.dtype)).astype(x.dtype)


def of_this_device(key: Key[Array, ""], outputs: PyTree) -> Key[Array, ""]:
    """The key with the device folded in, where outputs differ between devices (``shard_map``)."""
    axes = set().union(*map(varying_axes, jax.tree.leaves(outputs)))
    for axis in sorted(axes):
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


def _added(totals: list[PyTree]) -> PyTree:
    first, *rest = totals
    return jax.tree.map(lambda *xs: sum(xs[1:], xs[0]), first, *rest)


def _sum(fn: Callable[[Any], PyTree], xs: PyTree, chunk: int) -> PyTree:
    """Sum of ``fn`` over the leading axes of ``xs``, ``chunk`` entries at a time."""
    one_by_one = min(chunk, len(jax.tree.leaves(xs)[0])) == 1

    def part(xs: PyTree, _: Int[Array, ""] | None) -> PyTree:
        if one_by_one:
            return fn(jax.tree.map(lambda x: x[0], xs))
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(fn)(xs))

    return sum_over_chunks(part, xs, chunk, in_loop=fast_convolutions)
