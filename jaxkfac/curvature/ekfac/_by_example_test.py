"""What is squared: an example's gradient over its positions and all uses, padding left out.

Programs of every kind, and every option, are in ``_correct_test.py``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkfac.curvature import correct_eigenvalues, identity_bases
from jaxkfac.factors import Gaussian, Objective, value_grad_and_factors

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
N, S = 4, 6  # more positions than are squared in pairs
PARAMS = {k: RNG.normal(size=n) for k, n in {"w": (3, 3), "b": 3, "u": (3, 2), "c": 2}.items()}
X, Y = RNG.normal(size=(N, S, 3)), RNG.normal(size=(N, S, 2))
EXISTS = np.arange(S) < np.arange(3, 3 + N)[:, None]
NO_SHIFT = [np.zeros((N, S, 3)), np.zeros((N, S, 3)), np.zeros((N, S, 2))]


def model(p, x, shifts=(0.0, 0.0, 0.0)):
    """A layer used twice, and one used once; every position reads the others, padding too."""
    inputs = []
    for layer, shift in zip(("wb", "wb", "uc"), shifts, strict=True):
        inputs.append(x)
        x = jnp.tanh(x @ p[layer[0]] + p[layer[1]] + shift)
        x = x + x.mean(1, keepdims=True)
    return x, inputs


OBJECTIVE = Objective(lambda p, x: model(p, x)[0], Gaussian())


def rows():
    """Input rows and output gradients of each use, with ones, and zero where there is padding."""

    def loss(shifts):
        outputs, inputs = model(PARAMS, X, shifts)
        return jnp.where(EXISTS[..., None], jnp.square(outputs - Y) / 2, 0).sum(), inputs

    g, a = jax.jit(jax.grad(loss, has_aux=True))(NO_SHIFT)
    assert all(np.abs(x[~EXISTS]).max() > 0.01 for x in g)  # padding carries gradient
    ones = np.ones((N, S, 1))
    return [
        (np.concatenate([x, ones], -1), np.where(EXISTS[..., None], y, 0)) for x, y in zip(a, g)
    ]


def rotated(bases):
    """The bases with eigenvectors that mix everything."""

    def turned(spectrum):
        size = spectrum.values.shape[-1]
        return spectrum._replace(
            vectors=jnp.asarray(np.linalg.qr(RNG.normal(size=(size, size)))[0])
        )

    sides = {side: {k: turned(v) for k, v in getattr(bases, side).items()} for side in ("a", "g")}
    return dataclasses.replace(bases, **sides)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize("per", ["example", "token"])
def test_squares_are_of_whole_gradients_of_what_exists(bias, per):
    stats = value_grad_and_factors(OBJECTIVE, bias=bias)
    bases = rotated(identity_bases(stats.factor_shapes(PARAMS, (X, Y, EXISTS))))
    correct = jax.jit(correct_eigenvalues(OBJECTIVE, bases, per=per))
    found = correct(PARAMS, (X, Y, EXISTS), positions=EXISTS)
    uses = rows()
    for name, of in (("w", uses[:2]), ("u", uses[2:])):
        basis = found[name]
        gradients = [np.einsum("nsi,nso->nsio", a, g @ basis.g_vectors) for a, g in of]
        gradients = sum(gradients).sum(1) if per == "example" else np.concatenate(gradients)
        *weight, row = np.moveaxis(gradients.reshape(-1, *gradients.shape[-2:]), 1, 0)
        if bias == "joint":
            weight = [*weight, row]
        else:
            expected = np.square(row).sum(0) / EXISTS.sum()
            np.testing.assert_allclose(basis.bias_raw_values, expected, rtol=1e-10)
        weight = np.einsum("inp,ij->njp", weight, basis.a_vectors)
        expected = np.square(weight).sum(0) / EXISTS.sum()
        np.testing.assert_allclose(basis.raw_values, expected, rtol=1e-10)


def test_squares_of_a_convolution_are_those_of_each_examples_gradient():
    rng = np.random.default_rng(1)
    k, x, y = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 2, 3), (N, 5, 4, 2), (N, 3)))

    def apply_fn(k, x):
        out = jax.lax.conv_general_dilated(
            x, k, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(out).mean((1, 2))

    objective = Objective(apply_fn, Gaussian())
    bases = identity_bases(value_grad_and_factors(objective).factor_shapes(k, (x, y)))
    (found,) = correct_eigenvalues(objective, bases)(k, (x, y)).values()
    one = jax.vmap(jax.grad(objective), (None, 0))(k, (x[:, None], y[:, None]))
    expected = jnp.square(one).mean(0).reshape(found.raw_values.shape)
    np.testing.assert_allclose(found.raw_values, expected, rtol=1e-10)


@pytest.mark.exhaustive
def test_crops_side_by_side_belong_to_their_examples():
    """Two views along the batch: the gradient of an example is the sum over both."""

    def crops(p, x):
        h = jnp.tanh(jnp.concatenate([x, jnp.sin(x)]) @ p["w"] + p["b"])
        one, other = jnp.split(h, 2)
        return (one * other) @ p["u"]

    x, y = jnp.asarray(X[:, 0]), jnp.asarray(Y[:, 0])
    objective = Objective(crops, Gaussian())
    factors = value_grad_and_factors(objective)(PARAMS, (x, y)).factors
    bases = rotated(identity_bases(factors))
    found = correct_eigenvalues(objective, bases)(PARAMS, (x, y))
    one = lambda p, x, y: objective(p, (x[None], y[None]))
    each = jax.vmap(jax.grad(one), (None, 0, 0))(PARAMS, x, y)
    kernel = np.concatenate([each["w"], each["b"][:, None]], 1)
    for name, gradients in (("w", kernel), ("u", each["u"])):
        basis = found[name]
        turned = np.einsum("ia,nij,jb->nab", basis.a_vectors, gradients, basis.g_vectors)
        np.testing.assert_allclose(basis.raw_values, np.square(turned).mean(0), rtol=1e-10)
