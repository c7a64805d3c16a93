"""Dropout of the encoder-decoder: by the key, where T5 has it, and nothing without a key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkfac as jk
from jaxkfac.jobs.models import EncoderDecoder
from jaxkfac.jobs.models.encoder_decoder import _encoder_decoder
from jaxkfac.jobs.models.encoder_decoder._config import Dropout
from jaxkfac.jobs.models.encoder_decoder._encoder_decoder_test import CONFIG, pairs_of, same_factors

KEY = jax.random.key(3)
B, S, T, D, F, H = 2, 6, 5, CONFIG.width, CONFIG.hidden, CONFIG.num_heads
STREAM, ASKING = (B, S, D), (B, T, D)


@pytest.fixture(scope="module")
def built():
    """``built(rate)``: the function, compiled once for each rate."""
    known = {}

    def make(rate):
        if rate not in known:
            model = EncoderDecoder(CONFIG, dropout=rate, rngs=nnx.Rngs(0))
            apply_fn, params = jk.from_nnx(model)
            known[rate] = jax.jit(apply_fn), params
        return known[rate]

    return make


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_stays_is_divided_by_its_probability(dtype):
    x = jnp.full(200_000, 3.0, dtype)
    dropped = np.asarray(Dropout(0.25, KEY)(x).astype(jnp.float32))
    assert set(np.unique(dropped)) == {0.0, 4.0}
    # five deviations of the mean of so many numbers, sqrt(p (1 - p) / n)
    assert abs((dropped == 0).mean() - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5


@pytest.mark.parametrize("dropout", [Dropout(), Dropout(0.5), Dropout(0.0, KEY)])
def test_without_a_key_or_a_rate_there_is_no_operation(dropout):
    x = jnp.ones(3)
    assert dropout(x) is x and dropout.at(1)(x) is x and dropout.split(2) == ()


def test_places_and_blocks_draw_numbers_of_their_own():
    dropout, x = Dropout(0.5, KEY), jnp.ones(64)
    (keys,) = dropout.at(2).split(2)
    found = [dropout.at(0)(x), dropout.at(1)(x), *(Dropout(0.5, key)(x) for key in keys)]
    assert len({np.asarray(one).tobytes() for one in found}) == 4
    np.testing.assert_array_equal(dropout.at(1)(x), found[1])


def test_a_rate_that_is_no_probability_is_refused():
    with pytest.raises(ValueError, match=r"dropout=1: expected a probability in \[0, 1\)"):
        EncoderDecoder(CONFIG, dropout=1, rngs=nnx.Rngs(0))


@pytest.mark.exhaustive
def test_no_key_and_rate_0_give_the_bits_of_the_model_without_dropout(built):
    plain, params = built(0.0)
    dropping, _ = built(0.3)
    logits = plain(params, pairs_of())
    np.testing.assert_array_equal(dropping(params, pairs_of()), logits)
    np.testing.assert_array_equal(plain(params, pairs_of(), key=KEY), logits)


@pytest.mark.exhaustive
def test_logits_are_of_the_key(built):
    dropping, params = built(0.3)
    one, again, other = (
        np.asarray(dropping(params, pairs_of(), key=key)) for key in (KEY, KEY, jax.random.key(4))
    )
    np.testing.assert_array_equal(again, one)
    assert np.abs(other - one).max() > 1e-2
    assert np.abs(one - np.asarray(dropping(params, pairs_of()))).max() > 1e-2


@pytest.mark.slow
def test_numbers_are_dropped_where_t5_drops_them(monkeypatch):
    """Embedding; in a block weights, attention, hidden layer, feed-forward; the stack's outputs."""
    places = []

    class Noted(Dropout):
        def __call__(self, x):
            if not self.is_off:
                places.append(x.shape)
            return super().__call__(x)

        def at(self, place):
            found = super().at(place)
            return Noted(found.rate, found.key)

    monkeypatch.setattr(_encoder_decoder, "Dropout", Noted)
    apply_fn, params = jk.from_nnx(EncoderDecoder(CONFIG, dropout=0.1, rngs=nnx.Rngs(0)))
    jax.eval_shape(lambda key: apply_fn(params, pairs_of(), key=key), KEY)
    encoder = [STREAM, (B, H, S, S), STREAM, (B, S, F), STREAM, STREAM]
    decoder = [ASKING, (B, H, T, T), ASKING, (B, H, T, S), ASKING, (B, T, F), ASKING, ASKING]
    expected = encoder + decoder
    assert places[: len(expected)] == expected
    assert places == expected * (len(places) // len(expected))  # it may be traced again


@pytest.mark.exhaustive
def test_curvature_under_dropout_is_that_of_the_same_draws(built):
    dropping, params = built(0.3)
    objective = jk.Objective(dropping, jk.Categorical())
    counts = same_factors(objective, params, key=KEY).a_counts  # padding is in none
    assert float(counts["encoder/block/layer/1/DenseReluDense/wo/kernel"][0]) == 10
    batch = pairs_of(), pairs_of().decoder_inputs
    found = jax.jit(jk.value_grad_and_factors(objective))(params, batch, KEY)
    loss, grads = jax.jit(jax.value_and_grad(objective))(params, batch, KEY)
    np.testing.assert_allclose(found.value, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.grads, grads
    )


def test_what_a_file_says_is_taken_where_it_is_asked_for_and_written_again():
    stored = CONFIG.to_hugging_face()
    assert stored["dropout_rate"] == 0.0
    config = type(CONFIG).from_hugging_face(stored | {"dropout_rate": 0.2})
    assert config.dropout == 0.2 and config.to_hugging_face()["dropout_rate"] == 0.2
    del stored["dropout_rate"]
    assert type(CONFIG).from_hugging_face(stored).dropout == 0.1
