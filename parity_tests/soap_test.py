"""``kfe_adam`` in the gradient's own covariances is SOAP, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxkfac as jk
from parity_tests.packages import imported

RATE, BETA, EVERY, STEPS = 1e-2, 0.9, 3, 11


@pytest.mark.usefixtures("x64")
def test_kfe_adam_of_the_gradients_covariance_is_published_soap():
    published = imported("pytorch_optimizer")
    rng = np.random.default_rng(0)
    # Square, so that the first covariances have full rank: LAPACK may choose any basis of a kernel.
    params = {name: rng.normal(size=(6, 6)) / 3 for name in ("up", "down")}
    x, y = rng.normal(size=(2, STEPS, 20, 6))

    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in params.items()}
    soap = published.SOAP(
        theirs.values(), lr=RATE, betas=(BETA, BETA), precondition_frequency=EVERY,
        weight_decay=0.0, eps=1e-15,
    )  # fmt: skip

    def net(p, x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    objective = jk.Objective(net, jk.Gaussian())
    stats = jk.value_grad_and_factors(objective)
    ours = {name: jnp.asarray(value) for name, value in params.items()}
    tx = jk.kfe_adam(
        RATE, like=stats.factor_shapes(ours, (x[0], jnp.asarray(y[0]))), covariance="gradient",
        b1=BETA, b2=BETA, decay=BETA, eps=1e-15, refresh_every=EVERY,
    )  # fmt: skip
    state, step = tx.init(ours), jax.jit(lambda g, s: tx.update(g, s, factors=None))

    for inputs, targets in zip(x, y, strict=True):
        soap.zero_grad()
        hidden = torch.tanh(torch.tensor(inputs) @ theirs["up"])
        error = hidden @ theirs["down"] - torch.tensor(targets)
        (0.5 * error.square().sum(1).mean()).backward()
        soap.step()
        updates, state = step(jax.grad(objective)(ours, (inputs, jnp.asarray(targets))), state)
        ours = optax.apply_updates(ours, updates)
        for name, moved in theirs.items():  # its QR decompositions are in float32
            expected = moved.detach().numpy()
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5 * RATE * STEPS)
    assert not np.allclose(ours["up"], params["up"], atol=0.5 * RATE * STEPS)
