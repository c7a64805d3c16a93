"""The whole Fisher matrix of a small model, by the Jacobian with respect to its parameters."""

import functools
from typing import Any

import jax
import numpy as np

from tests._example_rows import examples, mask_of
from tests._likelihoods import pulls
from tests._taps import PLAIN, Model


@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_jacobian(model: Model, params: Any, x: Any):
    run = lambda p: model(p, x, PLAIN)
    return run(params), jax.jacrev(run)(params)


def root_fisher(
    model: Model,
    params: Any,
    batch: tuple,
    *,
    likelihood: str = "categorical",
    fisher: str = "exact",
    labels: Any = None,
) -> dict[str, np.ndarray]:
    """Γ by parameter path, (gradients, *shape), with F = Γᵀ Γ the mean over loss terms.

    With ``fisher="exact"`` F is the generalised Gauss-Newton matrix of the mean loss.
    """
    inputs, targets, *_ = batch
    gradients: dict[str, list[np.ndarray]] = {}
    masks = None
    for n, x in enumerate(examples(inputs)):
        outputs, jacobian = _outputs_and_jacobian(model, params, x)
        if masks is None:
            masks = mask_of(batch, outputs.shape[1:-1])
        drawn = None if labels is None else np.asarray(labels)[:, n]
        output, target = np.asarray(outputs[0]), np.asarray(targets)[n]
        vs = pulls(likelihood, fisher, output, target, masks[n], drawn)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jacobian):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            j = np.asarray(leaf[0])
            found = [np.tensordot(v, j, axes=v.ndim) for v in vs]
            gradients.setdefault(name, []).extend(found)
    return {name: np.stack(g) / np.sqrt(masks.sum()) for name, g in gradients.items()}


def fisher_block(root: dict[str, np.ndarray], *paths: str) -> np.ndarray:
    """The block of one layer: its kernel's entries in order, then its bias's."""
    flat = np.concatenate([root[path].reshape(len(root[path]), -1) for path in paths], axis=1)
    return flat.T @ flat
