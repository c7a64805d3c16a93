"""The Fisher information matrix of a batch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxkfac._checks import at_least_one
from jaxkfac.curvature.operators._exact import ExactOperator, checked_batch, chosen_paths
from jaxkfac.curvature.operators._marked import marked_gauss_newton
from jaxkfac.curvature.operators._operator import Operator
from jaxkfac.curvature.operators._products import (
    Chunk,
    Leaves,
    estimated_products,
    expected_products,
    outer_products,
)
from jaxkfac.factors import FISHER_TYPES, LABEL_FOLD, Estimator, Objective, estimator_of
from jaxkfac.interception import fast_convolutions
from jaxkfac.linalg import map_over_chunks

FisherType = Literal["exact", "empirical", "mc"]

# Products with a vector on one chunk that are cheaper than ``estimated_products``.
_PRODUCTS: Mapping[type[Estimator], Callable[[Chunk, Leaves], Leaves]] = {
    FISHER_TYPES["exact"]: expected_products,
    FISHER_TYPES["empirical"]: outer_products,
    FISHER_TYPES["mc"]: outer_products,
}


def fisher(
    objective: Callable[..., Any],
    params: PyTree,
    batch: Any,
    *,
    fisher: FisherType | Estimator = "exact",
    key: Key[Array, ""] | None = None,
    labels: PyTree = None,
    samples: int = 1,
    chunk: int | None = None,
    only: str | None = None,
    state: PyTree | None = None,
) -> Operator:
    r"""The Fisher information of the mean loss, as an operator.

    Over $N$ examples of $R$ loss terms (with a mask, the kept terms in place of $NR$), with
    $g_n$ the gradient of the *sum* of one example's negative log-likelihoods,

    $$ F = \frac{1}{NR} \sum_n \operatorname{E} \bigl[ g_n g_n^\top \bigr], $$

    the scale of the Kronecker factors. Labels are independent from term to term, so the
    expectation is $J^\top H J$ with $H$ the Fisher of the outputs. ``jk.Categorical()``,
    ``jk.Bernoulli()`` and ``jk.Gaussian()`` take natural parameters, for which this is
    :func:`ggn`; another likelihood goes through its ``fisher_column``, one column at a time.

    Args:
        objective: A ``jk.Objective``; or, for ``"exact"``, a scalar loss that marks its outputs
            (``jk.mark_outputs``).
        params: Parameters; integer leaves and keys are held out.
        batch: ``(inputs, targets)`` or ``(inputs, targets, mask)``.
        fisher: ``"exact"``: the expectation over the model's own labels. ``"empirical"``:
            the given targets in place of the expectation. ``"mc"``: labels sampled from the
            model, once, when the operator is built; unbiased, of rank at most
            ``samples * N``. Or an ``Estimator`` of your own, run on each example by itself.
        key: For dropout, and for the labels of ``"mc"``. An example's labels depend on the
            key and its place in the batch, not on the chunk. They are not those that
            ``value_grad_and_factors`` samples from the same key: pass both ``labels=``.
        labels: ``(samples, *targets)`` for ``"mc"``, in place of sampled ones; a tree of them
            in the form of the likelihoods.
        samples: How many labels ``"mc"`` samples for each term.
        chunk: Examples at once, as for :func:`ggn`.
        only: Full-match pattern over parameter paths, as for :func:`ggn`.
        state: What a call changes, as for :func:`ggn`.

    Returns:
        A positive semi-definite :class:`Operator`. Two forward passes and one backward pass
        for each product; per-example gradients are never formed.

    Raises:
        TypeError: ``objective`` is no ``jk.Objective``, and marks no outputs.
        UnknownLayerError: ``only`` matches no parameter.
        ValueError: an unknown type, ``"mc"`` without a key or labels, or a batch that does
            not fit.

    Memory:
        As for :func:`ggn`; ``"mc"`` holds its labels.

    Example:
        >>> import jax.numpy as jnp, jaxkfac as jk
        >>> objective = jk.Objective(lambda p, x: x @ p["w"], jk.Gaussian())
        >>> params, batch = {"w": jnp.ones((4, 2))}, (jnp.eye(4), jnp.zeros((4, 2)))
        >>> empirical = jk.operators.fisher(objective, params, batch, fisher="empirical")
        >>> print((empirical @ {"w": 4 * jnp.ones((4, 2))})["w"][0])
        [2. 2.]

    References:
        James Martens, "New Insights and Perspectives on the Natural Gradient Method", 2020.
        Frederik Kunstner, Lukas Balles and Philipp Hennig, "Limitations of the Empirical
        Fisher Approximation", 2019.
    """
    at_least_one(samples=samples)
    estimator = estimator_of(fisher, samples=samples, chunk=1, of_examples=True)
    rule = _PRODUCTS.get(type(estimator), estimated_products)
    if not isinstance(objective, Objective):
        if rule is not expected_products:
            raise ValueError(
                f'fisher="{estimator.name}" needs gradients of examples, which a scalar loss does '
                'not show: give a jk.Objective, or take fisher="exact"'
            )
        return marked_gauss_newton("fisher", objective, params, batch, key, chunk, only, state)
    batch = objective.batch(batch)
    estimator = estimator.bound(key, labels, batch)
    checked = checked_batch(objective, params, batch, key, chunk, labels, state)
    paths = chosen_paths(only, params)
    operator = ExactOperator(params, checked, None, key, state, objective, rule, chunk, paths)
    if rule is estimated_products:
        by_example = estimator.by_example(batch.num_examples)
    elif not estimator.samples_labels:
        return operator
    elif labels is None:
        by_example = _sample(operator, estimator.samples)
    else:
        by_example = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), labels)
    return dataclasses.replace(operator, labels=by_example)


def _sample(operator: ExactOperator, samples: int) -> PyTree:
    """Labels ``(N, samples, *targets)`` from the model's outputs."""
    base = jax.random.fold_in(operator.key, LABEL_FOLD)
    number = operator.batch.num_examples
    keys = jax.vmap(lambda n: jax.random.split(jax.random.fold_in(base, n), samples))

    def sample(key: Any, outputs: PyTree) -> PyTree:
        """Labels of one example, given without its leading axis."""
        whole = jax.tree.map(lambda y: y[None], outputs)
        return jax.tree.map(lambda y: y[0], operator.objective.sample(key, whole))

    def labels(chunk: Chunk) -> PyTree:
        outputs = jax.lax.stop_gradient(chunk.outputs(chunk.leaves))
        # keys stand in the place of labels
        return jax.vmap(lambda ks, y: jax.vmap(lambda k: sample(k, y))(ks))(chunk.labels, outputs)

    examples = (operator.batch, keys(jnp.arange(number)))
    per_chunk = operator.over_chunks(labels)
    return map_over_chunks(per_chunk, examples, operator.chunk, in_loop=fast_convolutions)
