"""Complex parameters have no factors here, and are named; nothing drops an imaginary part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkfac as jk
from tests._checks import assert_reported, assert_tree_close
from tests._programs import labels, normal


def spectral(p, x):
    """A product in the Fourier domain, with complex weights."""
    z = jnp.fft.rfft(jnp.tanh(x @ p["up"])) @ p["mix"]
    return jnp.fft.irfft(z, n=4) @ p["head"]


def spectral_of_two_reals(p, x):
    return spectral(p | {"mix": jax.lax.complex(p["re"], p["im"])}, x)


def params():
    mix = jax.lax.complex(normal(2, 3, 3), normal(3, 3, 3))
    return {"up": normal(1, 4, 4), "mix": mix, "head": normal(4, 4, 3)}


def batch():
    return normal(5, 6, 4), labels(6, 6)


@pytest.mark.slow
def test_a_complex_leaf_is_named_and_its_neighbours_are_right(x64):
    objective = jk.Objective(spectral, jk.Categorical())
    with pytest.raises(jk.UncoveredParameterError, match=r"mix: is complex \(complex128\)") as said:
        jk.value_grad_and_factors(objective)(params(), batch())
    assert "pass uncovered='ignore'" in str(said.value)  # 'diagonal' would not do
    with pytest.raises(jk.UncoveredParameterError, match="'mix' is complex"):
        jk.value_grad_and_factors(objective, uncovered="diagonal")(params(), batch())
    found = jk.value_grad_and_factors(objective, uncovered="ignore")(params(), batch())
    assert_tree_close(found.grads["up"], jax.grad(objective)(params(), batch())["up"], 1e-12)
    np.testing.assert_allclose(
        found.grads["mix"], jax.grad(objective)(params(), batch())["mix"], rtol=1e-12
    )
    # The mixing is a constant of the others: with it held, they have the same factors.
    real = {k: v for k, v in params().items() if k != "mix"}
    held = jk.Objective(lambda p, x: spectral(p | {"mix": params()["mix"]}, x), jk.Categorical())
    expected = jk.value_grad_and_factors(held)(real, batch()).factors
    for name in ("up", "head"):
        for mine, other in zip(found.factors[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-12, atol=1e-14)


def test_what_the_message_says_works(x64):
    def apart(p, x):
        z = jnp.fft.rfft(jnp.tanh(x @ p["up"]))
        re, im = z.real @ p["re"] - z.imag @ p["im"], z.real @ p["im"] + z.imag @ p["re"]
        return jnp.fft.irfft(jax.lax.complex(re, im), n=4) @ p["head"]

    real = {k: v for k, v in params().items() if k != "mix"}
    real |= {"re": params()["mix"].real, "im": params()["mix"].imag}
    value, grads, factors = jk.value_grad_and_factors(jk.Objective(apart, jk.Categorical()))(
        real, batch()
    )
    of_complex = jax.value_and_grad(jk.Objective(spectral, jk.Categorical()))(params(), batch())
    np.testing.assert_allclose(value, of_complex[0], rtol=1e-12)
    mix = of_complex[1]["mix"]  # JAX's gradient of a complex parameter is conjugate
    np.testing.assert_allclose(jax.lax.complex(grads["re"], -grads["im"]), mix, rtol=1e-10)
    z = np.fft.rfft(np.tanh(batch()[0] @ real["up"]))
    rows = np.concatenate([z.real, z.imag])
    np.testing.assert_allclose(factors["re"].a, rows.T @ rows / len(rows), rtol=1e-10, atol=1e-14)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("model", "path", "primitive"),
    [
        (
            lambda p, x: jnp.einsum("ni,io->no", jnp.fft.fft(x), p["w"]).real,
            "w",
            "meets complex numbers in `dot_general`",
        ),
        (lambda p, x: (x.astype(complex) @ p["w"].astype(complex)).real, "w", "to complex"),
        (lambda p, x: (jnp.fft.fft(x) * p["w"][0].astype(complex)).real, "w", "to complex"),
        (lambda p, x: (jnp.fft.fft(x) @ jax.lax.complex(p["w"], p["v"])).real, "w", "`complex`"),
    ],
)
def test_a_real_parameter_that_becomes_complex_is_named(x64, model, path, primitive):
    assert_reported(model, {"w": normal(1, 4, 4), "v": normal(2, 4, 4)}, (normal(3, 5, 4),), path,
                    primitive)  # fmt: skip
