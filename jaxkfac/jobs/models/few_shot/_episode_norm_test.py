import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkfac.jobs.models import EpisodeNorm


def normalised(x, scale, bias, epsilon=1e-5):
    """One episode, by the paper."""
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + epsilon) * scale + bias


@pytest.fixture
def episodes():
    return np.random.default_rng(0).normal(2.0, 3.0, size=(2, 4, 3, 3, 5)).astype(np.float32)


def norm():
    layer = EpisodeNorm(5)
    layer.scale[...], layer.bias[...] = jnp.arange(1.0, 6.0), jnp.arange(0.0, 5.0)
    return layer


def test_each_episode_is_normalised_by_itself(episodes):
    expected = [normalised(x, np.arange(1, 6), np.arange(5)) for x in episodes]
    np.testing.assert_allclose(norm()(jnp.asarray(episodes)), expected, rtol=1e-4, atol=1e-4)


def test_running_statistics_move_by_the_mean_of_the_episodes_and_serve_in_evaluation(episodes):
    layer = norm()
    layer(jnp.asarray(episodes))
    mean = np.mean([x.mean((0, 1, 2)) for x in episodes], axis=0)
    var = np.mean([x.var((0, 1, 2), ddof=1) for x in episodes], axis=0)
    np.testing.assert_allclose(layer.mean[...], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(layer.var[...], 0.9 + 0.1 * var, rtol=1e-5)
    layer.eval()
    held = jax.tree.map(jnp.copy, nnx.state(layer, nnx.BatchStat))
    found = layer(jnp.asarray(episodes))
    expected = (episodes - 0.1 * mean) / np.sqrt(0.9 + 0.1 * var + 1e-5)
    np.testing.assert_allclose(found, expected * np.arange(1, 6) + np.arange(5), rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer, nnx.BatchStat), held)


def test_a_single_value_has_a_finite_variance():
    layer = EpisodeNorm(2)
    found = layer(jnp.ones((1, 1, 1, 1, 2)))
    assert jnp.isfinite(found).all() and jnp.isfinite(layer.var[...]).all()
