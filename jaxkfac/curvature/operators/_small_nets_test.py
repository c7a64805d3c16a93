"""Small problems whose curvature can be written out, shared by the tests of this folder."""

import itertools

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jaxkfac.factors import Bernoulli, Categorical, Gaussian, Objective

LIKELIHOODS = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}


def mlp(params, x):
    h = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return h @ params["second"]["kernel"]


def attention(params, x):
    h = jnp.tanh(x @ params["in"]) * params["scale"]
    weights = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", h, h))
    return jnp.einsum("nts,nsd->ntd", weights, h) @ params["out"] + params["bias"]


def mlp_problem(likelihood="categorical", n=5):
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "first": {
            "kernel": jax.random.normal(keys[0], (3, 4)),
            "bias": jax.random.normal(keys[1], (4,)),
        },
        "second": {"kernel": jax.random.normal(keys[2], (4, 3))},
    }
    x = jax.random.normal(keys[3], (n, 3))
    return _problem(mlp, LIKELIHOODS[likelihood], params, x, keys[4])


def attention_problem(likelihood="categorical", n=4, t=3, *, masked=True):
    """Tokens mix; the mask drops some terms of some examples and all of one's."""
    keys = jax.random.split(jax.random.key(1), 4)
    params = {
        "in": jax.random.normal(keys[0], (3, 3)),
        "scale": jnp.full(3, 1.5),
        "out": jax.random.normal(keys[1], (3, 2)),
        "bias": jnp.zeros(2),
    }
    x = jax.random.normal(keys[2], (n, t, 3))
    objective, params, batch = _problem(attention, LIKELIHOODS[likelihood], params, x, keys[3])
    if masked:
        mask = (jnp.arange(n * t).reshape(n, t) % 4 != 1).at[1].set(False)
        batch = (*batch, mask)
    return objective, params, batch


def _problem(apply_fn, likelihood, params, x, key):
    return Objective(apply_fn, likelihood), params, (x, likelihood.sample(key, apply_fn(params, x)))


PROBLEMS = {
    "mlp-categorical": (mlp_problem, "categorical"),
    "mlp-gaussian": (mlp_problem, "gaussian"),
    "attention-categorical": (attention_problem, "categorical"),
    "attention-bernoulli": (attention_problem, "bernoulli"),
}


def mask_of(batch):
    return batch[2] if len(batch) == 3 else jnp.ones(batch[0].shape[:-1], bool)


def number_of_terms(batch):
    return mask_of(batch).sum().astype(batch[0].dtype)


def dense_hessian(objective, params, batch):
    flat, unravel = ravel_pytree(params)
    return jax.jit(jax.hessian(lambda p: objective(unravel(p), batch)))(flat)


def dense_gauss_newton(objective, params, batch):
    """The sum over terms of J' H J, each term's H by ``jax.hessian``."""
    flat, unravel = ravel_pytree(params)
    inputs, targets, mask = batch[0], batch[1], mask_of(batch)

    def outputs(p):
        y = objective.apply_fn(unravel(p), inputs)
        return y.reshape(mask.size, y.shape[-1])

    @jax.jit
    def dense(p):
        jacobian = jax.jacfwd(outputs)(p)
        labels = targets.reshape(mask.size, *targets.shape[mask.ndim :])
        h = jax.vmap(jax.hessian(objective.likelihood.terms))(outputs(p), labels)
        h = jnp.where(mask.reshape(-1, 1, 1), h, 0)
        return jnp.einsum("tcp,tcd,tdq->pq", jacobian, h, jacobian)

    return dense(flat) / number_of_terms(batch)


def example_gradients(objective, unravel, flat, inputs, targets, mask):
    """Gradients of each example's sum of kept terms, ``(n, parameters)``."""

    def losses(p):
        terms = objective.likelihood.terms(objective.apply_fn(unravel(p), inputs), targets)
        return jnp.where(mask, terms, 0).reshape(len(inputs), -1).sum(-1)

    return jax.jacrev(losses)(flat)


def dense_empirical(objective, params, batch, targets=None):
    targets = batch[1] if targets is None else targets
    flat, unravel = ravel_pytree(params)
    rows = example_gradients(objective, unravel, flat, batch[0], targets, mask_of(batch))
    return rows.T @ rows / number_of_terms(batch)


def dense_expected(objective, params, batch):
    """The Fisher as its definition has it: the mean over every labelling, by its probability."""
    flat, unravel = ravel_pytree(params)
    inputs, targets, mask = batch[0], batch[1], mask_of(batch)
    one = [0, 1, 2][: objective.apply_fn(params, inputs).shape[-1]]
    if isinstance(objective.likelihood, Bernoulli):
        one = list(itertools.product((0, 1), repeat=targets.shape[-1]))
    labellings = list(itertools.product(one, repeat=mask[0].size))
    labellings = jnp.array(labellings, targets.dtype).reshape(-1, *targets.shape[1:])

    def outer(n, labels):
        example = inputs[n][None], labels[None], mask[n][None]
        outputs = objective.apply_fn(params, example[0])
        probability = jnp.exp(-objective.likelihood.terms(outputs, example[1]).sum())
        rows = example_gradients(objective, unravel, flat, *example)
        return probability * rows.T @ rows

    every = jax.vmap(jax.vmap(outer, in_axes=(None, 0)), in_axes=(0, None))
    total = jax.jit(every)(jnp.arange(len(inputs)), labellings).sum((0, 1))
    return total / number_of_terms(batch)
