"""Curvature of qwix's LoRA adapters, which Tunix trains: factors and scores by brute force."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from tests._checks import assert_factors_close
from tests._oracle import oracle

qwix = pytest.importorskip("qwix")
pytestmark = pytest.mark.usefixtures("x64")
RANK, ALPHA, SIZES = 2, 3.0, {"up": (4, 6), "down": (6, 3)}


class Net(nnx.Module):
    def __init__(self, rngs):
        for name, sizes in SIZES.items():
            setattr(self, name, nnx.Linear(*sizes, param_dtype=jnp.float64, rngs=rngs))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@pytest.fixture
def adapted():
    """An apply function of the adapters, the adapters, and a batch."""
    batch = jax.random.normal(jax.random.key(0), (12, 4)), jnp.arange(12) % 3
    provider = qwix.LoraProvider(module_path=".*", rank=RANK, alpha=ALPHA)
    model = qwix.apply_lora_to_model(Net(nnx.Rngs(0)), provider, batch[0], rngs=nnx.Rngs(1))
    graph, lora, rest = nnx.split(model, nnx.LoRAParam, ...)
    drawn = lambda x: 0.5 * jax.random.normal(jax.random.key(x.size), x.shape)  # B begins at zero
    return lambda lora, x: nnx.merge(graph, lora, rest)(x), jax.tree.map(drawn, lora), batch, rest


@pytest.mark.slow
def test_factors_are_those_of_the_written_out_branch(adapted):
    apply_fn, lora, batch, rest = adapted
    factors = jk.value_grad_and_factors(jk.Objective(apply_fn, jk.Categorical()))(lora, batch)[2]
    base = nnx.to_pure_dict(rest)

    def branch(params, x, tap, name):
        a, b = (params[name][f"kernel_lora_{part}"] for part in "ab")
        down = tap.dense(f"{name}/kernel_lora_a", x, x @ a)
        up = tap.dense(f"{name}/kernel_lora_b", down, down @ b)
        return x @ base[name]["kernel"] + base[name]["bias"] + ALPHA / RANK * up

    def written_out(params, x, tap):
        return branch(params, jnp.tanh(branch(params, x, tap, "up")), tap, "down")

    expected = oracle(written_out, nnx.to_pure_dict(lora), batch)
    assert_factors_close(factors, expected, 1e-10)


@pytest.mark.exhaustive
def test_scores_are_products_with_each_examples_gradient(adapted):
    """With factors that are the identity, influence is a product of gradients."""
    apply_fn, lora, batch, _ = adapted
    objective = jk.Objective(apply_fn, jk.Categorical())
    factors = jk.value_grad_and_factors(objective)(lora, batch).factors
    bases = jk.eigendecompose(factors)
    norms = jk.self_influence(objective, lora, bases, batch, damping=1e12)

    def gradient(x, y):
        return jax.flatten_util.ravel_pytree(jax.grad(objective)(lora, (x[None], y[None])))[0]

    rows = np.asarray(jax.vmap(gradient)(*batch))
    np.testing.assert_allclose(np.asarray(norms) * 1e12, (rows**2).sum(1), rtol=1e-6)
