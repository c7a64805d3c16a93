"""The Fisher types: which cotangents of the outputs are propagated back, and how they are
summed.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, PyTree, Shaped

from jaxkfac._checks import one_of
from jaxkfac.factors._estimator import LABEL_FOLD, Estimator
from jaxkfac.factors._objective import Batch, Objective
from jaxkfac.factors._program import Linearised
from jaxkfac.interception import Slot
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
        return outputs(at.emitted)

    def expectation(
        self,
        objective: Objective,
        outputs: Float[Array, "n *terms c"],
        batch: Batch,
        contribution: Callable[[Array], PyTree],
    ) -> PyTree:
        def loss(outputs: Float[Array, "n *terms c"]) -> Float[Array, ""]:
            return objective.loss(outputs, batch.targets, batch.mask)[0]

        return contribution(jax.grad(loss)(outputs))

    @property
    def concurrent(self) -> int:
        return 0


class MonteCarlo(Estimator):
    """Labels sampled from the model, independently for each term: the mean over samples."""

    name = "mc"
    samples_labels = True

    def expectation(
        self,
        objective: Objective,
        outputs: Float[Array, "n *terms c"],
        batch: Batch,
        contribution: Callable[[Array], PyTree],
    ) -> PyTree:
        def at_labels(targets: Array) -> PyTree:
            vjp = jax.vjp(lambda y: objective.loss(y, targets, batch.mask)[0], outputs)[1]
            return contribution(vjp(jnp.ones((), statistics_dtype(outputs.dtype)))[0])

        samples, labels = self.samples, self.labels
        if labels is not None:
            total, samples = _sum(at_labels, labels, self.chunk), len(labels)
        else:
            key = jax.random.fold_in(self.key, LABEL_FOLD)
            keys = key[None] if samples == 1 else jax.random.split(key, samples)
            sample = objective.likelihood.sample
            total = _sum(lambda k: at_labels(sample(k, outputs)), keys, self.chunk)
        return jax.tree.map(lambda x: x / jnp.asarray(samples, x.dtype), total)

    @property
    def concurrent(self) -> int:
        return 0 if self.samples == 1 else self.chunk


class Exact(Estimator):
    r"""The expectation over labels.

    For each loss term $r$ and each column $c$ of the square root of that term's Fisher, the
    column at $r$ and zero at every other term is propagated back: of all examples at once, and
    where examples are coupled (batch statistics) of one by one.
    """

    name = "exact"

    def gathered(
        self,
        objective: Callable[..., PyTree],
        at: Linearised,
        batch: PyTree,
        outputs: Callable[[Mapping[str, Slot]], PyTree],
    ) -> PyTree:
        if at.traced is None or not at.traced.coupled:
            return super().gathered(objective, at, batch, outputs)
        assert isinstance(objective, Objective)
        print(
            f"jaxkfac: examples meet {at.traced.coupled}, so fisher={self.name!r} runs "
            f"{math.prod(at.outputs.shape)} vector-Jacobian products: one for each example, loss "
            'term and column. fisher="mc" is unbiased with one',
            file=sys.stderr,
        )
        return self._of_terms(
            objective,
            at.outputs,
            batch,
            lambda cotangent: outputs(at.vjp(cotangent)),
            terms=at.outputs.shape[:-1],
        )

    def expectation(
        self,
        objective: Objective,
        outputs: Float[Array, "n *terms c"],
        batch: Batch,
        contribution: Callable[[Array], PyTree],
    ) -> PyTree:
        return self._of_terms(objective, outputs, batch, contribution, terms=outputs.shape[1:-1])

    def _of_terms(
        self,
        objective: Objective,
        outputs: Float[Array, "n *terms c"],
        batch: Batch,
        contribution: Callable[[Array], PyTree],
        *,
        terms: tuple[int, ...],
    ) -> PyTree:
        """One by one over the trailing axes ``terms`` of the loss terms, at once over the rest."""
        columns, rows = outputs.shape[-1], math.prod(terms)
        column = _column_of(objective, outputs, batch)

        def at_column(index: Int[Array, ""]) -> PyTree:
            here = (jnp.arange(rows) == index // columns).reshape(terms)
            return contribution(column(index % columns, here))

        return _sum(at_column, jnp.arange(columns * rows), self.chunk)


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
        if at.traced is not None and at.traced.coupled:
            raise ValueError(
                f"fisher={self.name!r}: examples meet {at.traced.coupled}, so one product for all "
                'of them mixes their terms: choose "mc" or "exact"'
            )
        return super().gathered(objective, at, batch, outputs)

    def expectation(
        self,
        objective: Objective,
        outputs: Float[Array, "n *terms c"],
        batch: Batch,
        contribution: Callable[[Array], PyTree],
    ) -> PyTree:
        column = _column_of(objective, outputs, batch)
        columns = jnp.arange(outputs.shape[-1])
        return _sum(lambda index: contribution(column(index, None)), columns, self.chunk)


class Forward(Empirical):
    """G is the identity: the gradient's own backward pass, in which no output is gathered."""

    name = "forward"
    needs_outputs = True
    unit_outputs = True
    of_examples = False


FISHER_TYPES: Mapping[str, type[Estimator]] = {
    cls.name: cls for cls in (Empirical, MonteCarlo, Exact, Forward, ExactIfTermsDoNotMix)
}


def estimator_of(fisher: str | Estimator, *, samples: int, chunk: int) -> Estimator:
    """The estimator of a Fisher type; one that is given is taken as it is.

    Raises:
        ValueError: an unknown name; or ``samples`` or ``chunk`` beside an estimator, which has its
            own.
    """
    if isinstance(fisher, Estimator):
        if (samples, chunk) != (1, 1):
            raise ValueError(
                f"samples={samples}, chunk={chunk} beside an Estimator: give them to "
                f"{type(fisher).__name__} itself"
            )
        return fisher
    one_of("fisher", fisher, tuple(FISHER_TYPES))
    return FISHER_TYPES[fisher](samples=samples, chunk=chunk)


def over_count(x: Float[Array, "*shape"], count: Num[Array, ""]) -> Float[Array, "*shape"]:
    """``x / count`` in the dtype of ``x``; 16 bits do not hold a count."""
    wide = x.astype(statistics_dtype(x.dtype))
    return (wide / count.astype(wide.dtype)).astype(x.dtype)


def number_of_terms(outputs: Float[Array, "n *terms c"], batch: Batch) -> Float[Array, ""]:
    """How many loss terms the mean is over; at least one."""
    dtype = statistics_dtype(outputs.dtype)
    if batch.mask is None:
        return jnp.asarray(math.prod(outputs.shape[:-1]), dtype)
    return jnp.maximum(batch.mask.sum(dtype=dtype), 1)


def _column_of(
    objective: Objective, outputs: Float[Array, "n *terms c"], batch: Batch
) -> Callable[[Array, Array | None], Array]:
    """A function of a column of the square root of the outputs' Fisher, and of which terms."""
    terms = number_of_terms(outputs, batch)

    def column(index: Int[Array, ""], here: Bool[Array, "*terms"] | None) -> Array:
        whole = objective.likelihood.fisher_column(outputs, index)
        kept = jnp.ones(outputs.shape[:-1], bool) if batch.mask is None else batch.mask
        if here is not None:
            kept = kept & here
        scaled = over_count(whole, terms)
        return jnp.where(kept[..., None], scaled, jnp.zeros((), scaled.dtype))

    return column


def _sum(fn: Callable[[Array], PyTree], xs: Shaped[Array, "n ..."], chunk: int) -> PyTree:
    """Sum of ``fn`` over the leading axis of ``xs``, ``chunk`` entries at a time."""
    one_by_one = min(chunk, len(xs)) == 1

    def part(xs: Shaped[Array, "chunk ..."], _: Int[Array, ""] | None) -> PyTree:
        if one_by_one:
            return fn(xs[0])
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(fn)(xs))

    return sum_over_chunks(part, xs, chunk)
