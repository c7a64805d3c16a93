"""Programs whose rows cannot be told apart by example: each example has a pass of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxkfac._errors import LostRowsError
from jaxkfac.curvature import correct_eigenvalues, identity_bases
from jaxkfac.factors import Categorical, Objective, value_grad_and_factors
from jaxkfac.interception import mark_outputs

pytestmark = pytest.mark.usefixtures("x64")

N, S = 5, 3
RNG = np.random.default_rng(0)
PARAMS = {k: RNG.normal(size=n) for k, n in {"w": (4, 6), "b": 6, "s": 6, "v": (6, 3)}.items()}
BATCH = RNG.normal(size=(N, S, 4)), RNG.integers(0, 3, (N, S))
LABELS = RNG.integers(0, 3, (2, N, S))


def model(p, x):
    """Positions that read each other, a scale, and a layer that is used twice."""
    h = jnp.tanh(x @ p["w"] + p["b"]) * p["s"]
    h = h + h.mean(-2, keepdims=True)
    return jnp.tanh(h) @ p["v"]


MAPPED = {
    "one by one": lambda p, x: lax.map(lambda row: model(p, row), x),
    "micro-batches and a remainder": lambda p, x: lax.map(
        lambda row: model(p, row), x, batch_size=2
    ),
    "a scan over stacked examples": lambda p, x: lax.scan(
        lambda carry, row: (carry, model(p, row[None])[0]), 0.0, x
    )[1],
}


def bases_of(fn, fisher):
    stats = value_grad_and_factors(Objective(fn, Categorical()), fisher=fisher)
    key = {"key": jax.random.key(0)} if fisher == "mc" else {}
    return identity_bases(stats.factor_shapes(PARAMS, BATCH, **key))


def corrected(fn, fisher, **options):
    labels = {"labels": LABELS} if fisher == "mc" else {}
    correct = correct_eigenvalues(
        Objective(fn, Categorical()), bases_of(model, fisher), fisher=fisher, **options
    )
    return jax.jit(correct)(PARAMS, BATCH, **labels).corrections


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fisher", ["empirical", "mc", "exact"])
@pytest.mark.parametrize("name", MAPPED)
def test_a_loop_over_examples_measures_what_one_batch_does(name, fisher, capsys):
    found, expected = corrected(MAPPED[name], fisher), corrected(model, fisher)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15), found, expected
    )
    said = capsys.readouterr().err
    assert said.count("take a backward pass for each of the 5 examples") == 1


def test_a_scalar_loss_is_refused():
    """Its marks may have examples of their own each, so no cotangent is known to be one's."""

    def loss(p, batch):
        logits = mark_outputs(MAPPED["one by one"](p, batch[0]), Categorical())
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[1][..., None], -1)
        return -chosen.mean()

    with pytest.raises(LostRowsError, match="its rows do not run along the examples"):
        correct_eigenvalues(loss, bases_of(model, "empirical"))(PARAMS, BATCH)
