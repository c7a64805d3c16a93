"""Layers in the Fourier domain: complex numbers, and what stands for them."""

import jax.numpy as jnp
from jax import lax

import jaxkfac as jk
from tests._oracle import oracle
from tests._programs import normal, tree
from tests._taps import PLAIN
from tests.zoo import Case, program

FAMILY = "Fourier layers"
MODES, S = 3, 8


def network(spectral):
    """A Fourier neural operator of one layer: its lowest modes mixed, beside a dense path."""

    def model(p, x, tap):
        h = tap.dense("lift", x, x @ p["lift"])
        z = jnp.fft.rfft(h, axis=1)[:, :MODES]
        mixed = jnp.fft.irfft(spectral(p, z, tap), S, axis=1)
        h = jnp.tanh(mixed + tap.dense("skip", h, h @ p["skip"] + p["skip_bias"], bias=True))
        return tap.dense("project", h, h @ p["project"])

    return model


def case(spectral, **weights):
    model = network(spectral)
    params = tree(0, lift=(1, 4), skip=(4, 4), skip_bias=(4,), project=(4, 2)) | weights
    batch = normal(1, 3, S, 1), normal(2, 3, S, 2)
    objective = jk.Objective(lambda p, x: model(p, x, PLAIN), jk.Gaussian())
    factors = oracle(model, params, batch, likelihood="gaussian")
    return Case(objective, params, batch, factors=factors)


def two():
    """Real arrays, the parts of a complex weight."""
    return {"re": normal(5, MODES, 4, 4), "im": normal(6, MODES, 4, 4)}


def in_reals(p, z, tap):
    """A kernel for each mode; rows of both parts of a number meet both arrays."""

    def mix(name, x):
        if tap is PLAIN:
            return jnp.einsum("nki,kio->nko", x, p[name])
        parts = [tap.dense(name, x[:, k], x[:, k] @ p[name][k], at=(k,)) for k in range(MODES)]
        return jnp.stack(parts, 1)

    return lax.complex(mix("re", z.real) - mix("im", z.imag), mix("re", z.imag) + mix("im", z.real))


@program("FNO: complex weights of two real arrays", family=FAMILY, checked="brute force")
def _complex():
    def spectral(p, z, tap):
        if tap is not PLAIN:
            return in_reals(p, z, tap)
        return jnp.einsum("nki,kio->nko", z, lax.complex(p["re"], p["im"]))

    return case(spectral, **two())


@program("FNO: complex products written in real ones", family=FAMILY, checked="brute force")
def _real():
    return case(in_reals, **two())


@program("FNO: complex weights", family=FAMILY,
         checked="gradient; brute force of all other layers",
         uncovered={"mix": "is complex"})  # fmt: skip
def _leaf():
    def spectral(p, z, tap):
        return jnp.einsum("nki,kio->nko", z, p["mix"])

    return case(spectral, mix=lax.complex(*two().values()))
