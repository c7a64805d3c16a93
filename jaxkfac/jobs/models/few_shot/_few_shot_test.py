"""Of both models: what an episode is, and that episodes do not see one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkfac.jobs.models import (
    Conv4,
    CosineTransformer,
    CosineTransformerConfig,
    PrototypicalNetwork,
)

WAY, SHOT, QUERIES = 3, 2, 4


def cosine(rngs):
    config = CosineTransformerConfig(WAY, SHOT, num_heads=2, head_size=3, hidden=5)
    return CosineTransformer(Conv4(16, width=4, rngs=rngs), config, rngs=rngs)


def prototypes(rngs):
    return PrototypicalNetwork(Conv4(16, width=4, rngs=rngs))


BOTH = pytest.mark.parametrize("build", [prototypes, cosine])


def episodes(count=1):
    rng = np.random.default_rng(0)
    support = rng.normal(size=(count, WAY, SHOT, 16, 16, 1)).astype(np.float32)
    return jnp.asarray(support), jnp.asarray(
        rng.normal(size=(count, QUERIES, 16, 16, 1)).astype(np.float32)
    )


@pytest.mark.exhaustive
@BOTH
def test_a_batch_of_episodes_is_each_episode_by_itself(build):
    support, query = episodes(2)
    model = build(nnx.Rngs(0))
    together = model(support, query)
    for i in range(2):
        alone = model(support[i : i + 1], query[i : i + 1])
        np.testing.assert_allclose(together[i : i + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@BOTH
def test_classes_in_another_order_have_their_logits_in_that_order(build):
    support, query = episodes()
    model, order = build(nnx.Rngs(0)), np.asarray([2, 0, 1])
    moved = model(support[:, order], query)
    np.testing.assert_allclose(moved, model(support, query)[..., order], rtol=1e-4, atol=1e-5)


def test_prototypes_are_means_and_logits_are_minus_squared_distances():
    class Pixels(nnx.Module):
        features = 4

        def __call__(self, images):
            return images.reshape(*images.shape[:2], 4)

    rng = np.random.default_rng(1)
    support, query = rng.normal(size=(1, 2, 3, 2, 2, 1)), rng.normal(size=(1, 5, 2, 2, 1))
    found = PrototypicalNetwork(Pixels())(jnp.asarray(support), jnp.asarray(query))
    means = support.reshape(2, 3, 4).mean(1)
    expected = -((query.reshape(5, 1, 4) - means) ** 2).sum(-1)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_the_support_weights_choose_the_images_of_a_class():
    """All weight on the second image: the first one is not seen."""
    support, query = episodes()
    model = cosine(nnx.Rngs(0))
    model.eval()  # so that images do not meet in the normalisation
    model.support_weights[...] = jnp.asarray([[0.0, 200.0]] * WAY)
    other = support.at[:, :, 0].set(0.5)
    np.testing.assert_allclose(model(other, query), model(support, query), rtol=1e-5)
    model.support_weights[...] = jnp.zeros((WAY, SHOT))
    assert jnp.abs(model(other, query) - model(support, query)).max() > 1e-4


@pytest.mark.slow
def test_the_heads_logits_are_at_most_twice_its_norm():
    model = cosine(nnx.Rngs(0))
    model.head.norm[...] = jnp.asarray([3.0])
    x = jnp.concatenate(
        [100 * model.head.direction[...].T, jax.random.normal(jax.random.key(0), (9, 3))]
    )
    np.testing.assert_allclose(model.head(x)[0], 6.0, rtol=1e-5)
    assert jnp.abs(model.head(x)).max() <= 6.0001
    assert jnp.isfinite(jax.grad(lambda x: model.head(x).sum())(jnp.zeros((1, 3)))).all()


def test_episodes_of_another_form_are_refused_with_their_shape():
    support, query = episodes()
    with pytest.raises(ValueError, match=r"3 classes with 2 images.*\(1, 3, 1, 16, 16, 1\)"):
        cosine(nnx.Rngs(0))(support[:, :, :1], query)
    with pytest.raises(ValueError, match="k_shot=0"):
        CosineTransformerConfig(5, 0)


@pytest.mark.slow
def test_many_queries_are_answered_as_few_are():
    """Compiled, where a fusion of XLA's once gave wrong numbers from the thirteenth query on."""
    rngs = nnx.Rngs(0)
    model = CosineTransformer(
        Conv4(16, width=32, rngs=rngs), CosineTransformerConfig(5, 1), rngs=rngs
    )
    model.eval()
    rng = np.random.default_rng(0)
    support, query = (
        jnp.asarray(rng.normal(size=shape).astype(np.float32))
        for shape in ((1, 5, 1, 16, 16, 1), (1, 40, 16, 16, 1))
    )
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs))
    together = call(state, support, query)
    few = [call(state, support, query[:, i : i + 4]) for i in range(0, 40, 4)]
    np.testing.assert_allclose(together, jnp.concatenate(few, axis=1), rtol=1e-3, atol=1e-3)
