"""Posteriors are those of laplace-torch 0.3: in its environment, and by what it has found once.

``python -m benchmarks.uses --equal --laplace ENV/bin/python --keep tests/laplace_torch`` writes
the file.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk

FILE = Path(__file__).parent / "laplace_torch" / "found.npz"
PRIOR, NOISE, TOLERANCE = 3.0, 0.7, 1e-9
pytestmark = pytest.mark.usefixtures("x64")


def model(p, x):
    for i in range(3):
        x = (jnp.tanh(x) if i else x) @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
    return x


def posterior_of(params, batch, likelihood=None, **options):
    """Biases in blocks of their own, as its Kronecker factors have them."""
    objective = jk.Objective(model, likelihood or jk.Categorical())
    stats = jk.value_grad_and_factors(objective, fisher="exact", bias="separate")
    bases = jk.eigendecompose(stats(params, batch)[2])
    number = len(batch[0])
    options = {"prior_precision": PRIOR, "num_examples": number} | options
    return jk.laplace(objective, params, bases, **options)


def assert_close(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.slow
def test_evidence_variance_and_predictives_are_those_that_it_found():
    found = {k: jnp.asarray(v) for k, v in np.load(FILE).items()}
    params = {k: v for k, v in found.items() if k.startswith("layers")}
    batch, inputs = (found["inputs"], found["targets"]), found["q_inputs"]
    posterior = posterior_of(params, batch)
    assert_close(posterior.log_marginal_likelihood(batch), found["found/evidence"])
    assert_close(posterior.variance(inputs), found["found/variance"])
    for method in ("probit", "bridge"):
        assert_close(posterior.predict(inputs, method), found[f"found/{method}"])


# ------------------------------------------------------------ in an environment with it


@pytest.fixture
def theirs():
    """Its ``Laplace``, and PyTorch."""
    torch = pytest.importorskip("torch", reason="laplace-torch is not installed")
    module = pytest.importorskip("laplace", reason="laplace-torch is not installed")
    return module.Laplace, torch


def problem(torch, outputs):
    """A network of theirs, its parameters as ours, and data in two batches."""
    torch.manual_seed(0)
    sizes = (4, 6, 5, outputs)
    linear = [torch.nn.Linear(*sides) for sides in zip(sizes[:-1], sizes[1:], strict=True)]
    network = torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1], torch.nn.Tanh(), linear[2])
    params = {}
    for i, layer in enumerate(linear):
        params[f"layers.{i}.w"] = jnp.asarray(layer.weight.detach().double().numpy().T)
        params[f"layers.{i}.b"] = jnp.asarray(layer.bias.detach().double().numpy())
    x = torch.randn(22, 4, dtype=torch.float64)
    return network.double(), params, x[:16], x[16:]


def fitted(theirs, network, x, y, likelihood, **options):
    laplace, torch = theirs
    data = torch.utils.data.TensorDataset(x, y)
    found = laplace(network, likelihood, hessian_structure="kron", prior_precision=PRIOR, **options)
    found.fit(torch.utils.data.DataLoader(data, batch_size=8))
    return found


@pytest.mark.parametrize("layers", [None, "layers.2.w"], ids=["all", "last layer"])
def test_of_a_classifier(theirs, layers):
    torch = theirs[1]
    network, params, x, inputs = problem(torch, 3)
    y = torch.arange(16) % 3
    subset = "all" if layers is None else "last_layer"
    expected = fitted(theirs, network, x, y, "classification", subset_of_weights=subset)
    batch = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    posterior = posterior_of(params, batch, layers=layers)
    evidence = posterior.log_marginal_likelihood(batch)
    assert_close(evidence, expected.log_marginal_likelihood().detach())
    ours = jnp.asarray(inputs.numpy())
    for method in ("probit", "bridge"):
        probabilities = expected(inputs, link_approx=method).detach()
        assert_close(posterior.predict(ours, method), probabilities)


def test_of_a_regression(theirs):
    torch = theirs[1]
    network, params, x, inputs = problem(torch, 2)
    y = torch.randn(16, 2, dtype=torch.float64)
    options = {"subset_of_weights": "all", "sigma_noise": NOISE}
    expected = fitted(theirs, network, x, y, "regression", **options)
    batch = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())
    posterior = posterior_of(params, batch, jk.Gaussian(), noise=NOISE)
    evidence = posterior.log_marginal_likelihood(batch)
    assert_close(evidence, expected.log_marginal_likelihood().detach())
    mean, variance = (v.detach() for v in expected(inputs))
    ours = jnp.asarray(inputs.numpy())
    assert_close(posterior.variance(ours), variance)
    assert_close(posterior.predict(ours).mean, mean)
