"""Laplace approximations: a posterior over parameters from the curvature at a minimum."""

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxkfac._arguments import ArrayTree, check_arrays, partition
from jaxkfac.curvature import Eigenbases, parameters_outside
from jaxkfac.factors import Gaussian, Objective
from jaxkfac.interception.coupling import Word
from jaxkfac.uses._damped_gradients import check_disjoint, owned_blocks
from jaxkfac.uses._examples import Examples, check_values
from jaxkfac.uses._laplace_posterior import LaplacePosterior
from jaxkfac.uses._posterior_precision import check_positive, raw, warn_of_empirical


def laplace(
    objective: Objective,
    params: ArrayTree,
    bases: Eigenbases,
    *,
    num_examples: float | int,
    prior_precision: ArrayLike = 1.0,
    noise: ArrayLike = 1.0,
    layers: str | None = None,
    terms_per_example: float | int | None = None,
    state: ArrayTree | None = None,
    experts: str | None = None,
    examples: Word | None = None,
) -> LaplacePosterior:
    r"""Build the Gaussian posterior around the parameters, with the curvature there as precision.

    With the prior $\mathcal N(0, \operatorname{diag}(\delta)^{-1})$, $N$ examples with $R$ loss
    terms each, and the curvature $F$ of the mean loss that the bases represent, the precision is

    $$ P = N R F + \operatorname{diag}(\delta) , $$

    and for a ``Gaussian()`` likelihood $F / \sigma^2$ replaces $F$. Eigenvalues are used as
    decomposed, with negative ones as 0; ``max_condition`` and ``floor`` of the bases have no
    effect.

    Nothing is computed yet. The posterior has ``log_marginal_likelihood(train)``,
    ``tune_prior(train)``, ``variance(inputs)``, ``predict(inputs)`` and ``sample(key, number)``.

    Args:
        objective: A model and its one likelihood.
        params: Parameters, at a minimum of the loss with the prior's penalty.
        bases: From :func:`eigendecompose`, or with eigenvalues measured by
            :func:`correct_eigenvalues`; of ``fisher="mc"`` or ``"exact"``.
        num_examples: $N$, the size of the full training set.
        prior_precision: $\delta > 0$, added to $N R F$, not to the curvature of the mean loss; one
            number, or ``(layers,)`` in the order of ``posterior.layers``.
        noise: $\sigma > 0$, the standard deviation of a Gaussian's noise.
        layers: A full-match pattern of layer names or parameter paths, for example the last layer
            or adapters. ``None`` takes all layers of the bases. All other parameters are fixed,
            and are listed in ``posterior.fixed``.
        terms_per_example: $R$, how many loss terms (tokens) of an example the mask keeps on
            average; needed if outputs have more axes than ``(N, C)``.
        state: What a call of the model takes besides its inputs (batch statistics).
        experts: As for the factors.
        examples: ``"apart"`` declares that no example's output depends on another example, where
            the program does not prove it; see :func:`value_grad_and_factors`.

    Returns:
        A :class:`LaplacePosterior`.

    Raises:
        UnknownLayerError: ``layers`` matches nothing.
        ValueError: a number that is not positive, a prior precision of another shape, a parameter
            that two layers own, several likelihoods, bases of another likelihood (if
            ``bases.origin`` shows it), without vectors, or with zero eigenvalues alone. Bases of
            another model and coupled examples are refused when data comes.
        NonFiniteFactorError: an eigenvalue is not finite; names the layer.
        TypeError: a scalar loss in place of an ``Objective``.

    Warns:
        UserWarning: the bases hold no curvature of the loss (``fisher="forward"``), or gradients
            at the given labels in its place (``"empirical"``).

    Example:
        >>> stats = jk.value_grad_and_factors(objective, fisher="exact")
        >>> bases = jk.eigendecompose(stats(params, batch).factors)
        >>> posterior = jk.laplace(objective, params, bases, num_examples=len(inputs))
        >>> posterior = posterior.tune_prior()
        >>> posterior.predict(inputs).shape == (len(inputs), 3)
        True

    References:
        Erik Daxberger et al., "Laplace Redux: Effortless Bayesian Deep Learning", 2021.
        Alexander Immer et al., "Scalable Marginal Likelihood Estimation for Model Selection in
        Deep Learning", 2021.
    """
    check_arrays("params", params)
    check_positive("num_examples", num_examples)
    if terms_per_example is not None:
        check_positive("terms_per_example", terms_per_example)
    if isinstance(objective, Objective) and objective.num_outputs > 1:
        raise ValueError(
            f"a Laplace posterior needs one likelihood, and this objective has "
            f"{objective.num_outputs}: give an Objective of the output that you want"
        )
    selected = Examples(objective, bases, layers, experts, examples)
    check_values(selected.bases)
    warn_of_empirical(selected.bases)
    (likelihood,) = jax.tree.leaves(objective.likelihood)
    if not isinstance(likelihood, Gaussian) and (isinstance(noise, Tracer) or noise != 1.0):
        raise ValueError(f"noise={noise}: only a Gaussian likelihood has one")
    chosen, blocks = raw(selected.bases), owned_blocks(selected.bases)
    shapes = {path: jnp.shape(leaf) for path, leaf in partition(params)[0].items()}
    check_disjoint(blocks, shapes)
    posterior = LaplacePosterior(
        params=params,
        bases=chosen,
        prior_precision=prior_precision,
        noise=noise,
        state=state,
        examples=selected.without_arrays(),
        num_examples=float(num_examples),
        terms_per_example=None if terms_per_example is None else float(terms_per_example),
        layers=tuple(block.layer.name for block in blocks),
        fixed=parameters_outside(chosen.layers, shapes),
    )
    return posterior.replace(prior_precision, noise)
