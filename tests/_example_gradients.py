"""Scores of whole programs beside gradients of each example's loss terms."""

from typing import Any

import jax
import numpy as np

import jaxkfac as jk

DAMPING = 0.1


def example_gradients(objective: Any, params: Any, batch: Any, **call: Any) -> Any:
    """``(N, *parameter)``: plain JAX's Jacobian of each example's sum over its kept terms.

    That is the gradient of the example by itself where no example sees another.
    """
    parts = objective.batch(batch)

    def totals(params: Any) -> Any:
        outputs = objective.outputs(params, parts.inputs, call.get("key"), call.get("state"))[0]
        heads = objective.heads(outputs, parts.targets, parts.mask)
        return sum(x.kept_terms().reshape(parts.num_examples, -1).sum(1) for x in heads)

    return jax.jit(jax.jacrev(totals))(params)


def check_scores(
    objective: Any, params: Any, batch: Any, bases: Any, tolerance: float, **call: Any
) -> None:
    """Pairwise and self scores are products of these gradients, solved one by one."""
    found = jk.influence(objective, params, bases, batch, batch, damping=DAMPING, **call)
    own = jk.self_influence(objective, params, bases, batch, damping=DAMPING, **call)
    each = example_gradients(objective, params, batch, **call)
    solve = jax.vmap(lambda g: jk.natural_gradient(g, bases, damping=DAMPING, missing="zero"))
    solved = jax.jit(solve)(each)
    expected = sum(
        np.asarray(x).reshape(len(x), -1) @ np.asarray(g).reshape(len(g), -1).T
        for x, g in zip(jax.tree.leaves(solved), jax.tree.leaves(each), strict=True)
    )
    bound = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(own, np.diagonal(expected), rtol=0, atol=bound)
