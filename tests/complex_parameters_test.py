"""Complex parameters have no factors and are named; two real ones in their place have them."""

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


def apart(p, x):
    """``spectral`` in real numbers alone."""
    z = jnp.fft.rfft(jnp.tanh(x @ p["up"]))
    re, im = z.real @ p["re"] - z.imag @ p["im"], z.real @ p["im"] + z.imag @ p["re"]
    return jnp.fft.irfft(jax.lax.complex(re, im), n=4) @ p["head"]


def of_two_reals():
    real = {k: v for k, v in params().items() if k != "mix"}
    return real | {"re": params()["mix"].real, "im": params()["mix"].imag}


FORMS = {
    "complex": lambda re, im: jax.lax.complex(re, im),
    "sum": lambda re, im: re + 1j * im,
    "scaled": lambda re, im: (2j * (im + -1j * re).T / 2).T,
}


@pytest.mark.default(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("form", FORMS)
def test_what_the_message_says_works(x64, form):
    def model(p, x):
        return spectral(p | {"mix": FORMS[form](p["re"], p["im"])}, x)

    value, grads, factors = jk.value_grad_and_factors(jk.Objective(model, jk.Categorical()))(
        of_two_reals(), batch()
    )
    of_complex = jax.value_and_grad(jk.Objective(spectral, jk.Categorical()))(params(), batch())
    np.testing.assert_allclose(value, of_complex[0], rtol=1e-12)
    mix = of_complex[1]["mix"]  # JAX's gradient of a complex parameter is conjugate
    np.testing.assert_allclose(jax.lax.complex(grads["re"], -grads["im"]), mix, rtol=1e-10)
    z = np.fft.rfft(np.tanh(batch()[0] @ params()["up"]))
    rows = np.concatenate([z.real, z.imag])
    np.testing.assert_allclose(factors["re"].a, rows.T @ rows / len(rows), rtol=1e-10, atol=1e-14)
    in_reals = jk.value_grad_and_factors(jk.Objective(apart, jk.Categorical()))
    expected = in_reals(of_two_reals(), batch()).factors
    for name in of_two_reals():
        for mine, other in zip(factors[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-14)


MEETINGS = {
    "product": (lambda p, z: z @ (p["w"] + 1j * p["v"]), "complex"),
    "cast": (lambda p, z: z @ p["w"].astype(complex), "complex"),
    "with bias": (lambda p, z: z @ p["w"].astype(complex) + (p["b"] + 1j * p["c"]), "complex"),
    "scale": (lambda p, z: z * (p["b"] + 1j * p["c"]), None),
    "phase": (lambda p, z: z * jnp.exp(1j * p["b"]), None),
    "quotient": (lambda p, z: z / (2 + jnp.abs(p["b"] + 1j * p["c"]) - 1j * p["c"]), None),
    "computed": (lambda p, z: z @ jnp.exp(1j * p["w"]), "reparameterised"),
    "transformed": (lambda p, z: z @ jnp.fft.fft(p["w"]), "reparameterised"),
}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("meeting", MEETINGS)
def test_real_parameters_that_meet_complex_data_have_the_statistics_of_examples(x64, meeting):
    meet, kind = MEETINGS[meeting]

    def model(p, x):
        # Turned, because spectra of real signals are symmetric: a wrong sign would permute rows.
        turn = np.exp(1j * np.arange(4))
        z = jnp.fft.fft(jnp.tanh(x @ p["up"])) * turn
        return jnp.fft.ifft(meet(p, z) * turn).real

    every = {"w": normal(1, 4, 4), "v": normal(2, 4, 4), "b": normal(3, 4), "c": normal(4, 4)}
    every |= {"up": normal(5, 4, 4)}
    read = {k: every[k] for k in every if k == "up" or f"'{k}'" in repr(meet.__code__.co_consts)}
    objective = jk.Objective(model, jk.Gaussian())
    data = normal(6, 5, 4), normal(7, 5, 4)
    if kind is not None:
        assert jk.find_layers(objective, read, data)["w"].kind == kind
    found = jk.check_coverage(objective, read, data)
    assert max([found.gradient, *found.factors.values(), *found.products.values()]) < 1e-12


@pytest.mark.standard_promotion
def test_a_kind_without_rows_of_complex_data_is_named(x64):
    model = lambda p, x: jnp.convolve(jnp.fft.fft(x[0]), p["w"][0]).real[None]
    reason = "meets complex numbers in `conv_general_dilated`, of which a 'conv' layer has no rows"
    assert_reported(model, {"w": normal(1, 4, 4)}, (normal(3, 5, 4),), "w", reason)


def test_a_forward_fisher_has_no_cotangents_of_complex_values(x64):
    model = lambda p, x: (jnp.fft.fft(x) * p["b"].astype(complex)).real
    stats = jk.value_grad_and_factors(jk.Objective(model, jk.Gaussian()), fisher="forward")
    with pytest.raises(ValueError, match="layer 'b': fisher='forward'"):
        jax.eval_shape(stats, {"b": normal(1, 4)}, (normal(2, 5, 4), normal(3, 5, 4)))
