"""Negative log-likelihoods by their formulas, and the cotangents each Fisher type pulls back."""

import jax
import jax.numpy as jnp
import numpy as np

from tests._taps import PLAIN, Model


def negative_log_likelihood(likelihood: str, outputs, targets):
    """One number per loss term: the last axis is summed, the others are terms."""
    if likelihood == "categorical":
        picked = jnp.take_along_axis(outputs, targets[..., None], axis=-1)[..., 0]
        return jnp.log(jnp.sum(jnp.exp(outputs), axis=-1)) - picked
    if likelihood == "bernoulli":
        return jnp.sum(jnp.log(1 + jnp.exp(outputs)) - targets * outputs, axis=-1)
    if likelihood == "gaussian":
        return 0.5 * jnp.sum((outputs - targets) ** 2, axis=-1)
    raise ValueError(likelihood)


def fisher_columns(likelihood: str, outputs: np.ndarray) -> np.ndarray:
    """Columns v_c with Σ_c v_c v_cᵀ the Fisher matrix of one term's outputs, as rows."""
    size = outputs.shape[-1]
    if likelihood == "categorical":
        p = np.exp(outputs) / np.exp(outputs).sum()
        return np.sqrt(p)[:, None] * (np.eye(size) - p)
    if likelihood == "bernoulli":
        s = 1 / (1 + np.exp(-outputs))
        return np.diag(np.sqrt(s * (1 - s)))
    return np.eye(size)


def mean_loss(model: Model, likelihood: str, params, batch):
    """Mean negative log-likelihood over the loss terms that the mask keeps."""
    inputs, targets, *mask = batch
    terms = negative_log_likelihood(likelihood, model(params, inputs, PLAIN), targets)
    if not mask:
        return jnp.mean(terms)
    return jnp.sum(terms * mask[0].astype(terms.dtype)) / jnp.sum(mask[0]).astype(terms.dtype)


def pulls(
    likelihood: str, fisher: str, outputs: np.ndarray, targets, mask: np.ndarray, labels=None
) -> list[np.ndarray]:
    """Cotangents v of one example's outputs (terms..., c); Fisher is the sum of their (Jᵀv)².

    "empirical": the gradient at the targets. "mc": at each row of ``labels``, over the root
    of their number. "exact": each column of each term's Fisher, all other terms zero.
    "exact_if_terms_do_not_mix": each column of all terms at once.
    """

    def gradient(y):
        def loss(f):
            terms = negative_log_likelihood(likelihood, f, y)
            return jnp.sum(terms * jnp.asarray(mask, terms.dtype))

        return np.asarray(jax.grad(loss)(jnp.asarray(outputs)), np.float64)

    if fisher == "empirical":
        return [gradient(targets)]
    if fisher == "mc":
        return [gradient(y) / np.sqrt(len(labels)) for y in labels]
    terms = [r for r in np.ndindex(*outputs.shape[:-1]) if mask[r]]
    columns = np.zeros((outputs.shape[-1], *outputs.shape))
    for r in terms:
        columns[(slice(None), *r)] = fisher_columns(likelihood, outputs[r])
    if fisher == "exact_if_terms_do_not_mix":
        return list(columns)
    if fisher != "exact":
        raise ValueError(fisher)
    alone = []
    for r in terms:
        only = np.zeros(outputs.shape)
        only[r] = 1
        alone.extend(column * only for column in columns)
    return alone
