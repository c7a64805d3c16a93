import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkfac.jobs.models import MLP, VisionTransformer, VisionTransformerConfig
from jaxkfac.jobs.models._networks import split_patches

SMALL = VisionTransformerConfig(width=8, depth=2, num_heads=2, hidden=12)


def loss_and_gradient(config, images):
    graph, params = nnx.split(VisionTransformer(config, rngs=nnx.Rngs(0)))

    def loss(params):
        return jnp.mean(nnx.merge(graph, params)(images) ** 2)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.exhaustive
def test_remat_changes_neither_value_nor_gradient():
    images = jax.random.normal(jax.random.key(1), (3, 8, 8))
    plain = loss_and_gradient(dataclasses.replace(SMALL, remat=False), images)
    remat = loss_and_gradient(SMALL, images)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_the_scan_applies_the_blocks_in_order():
    model = VisionTransformer(SMALL, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(1), (3, 8, 8))
    graph, stacked = nnx.split(model.blocks)
    x = model.patch(split_patches(images, SMALL)) + model.positions[...]
    for i in range(SMALL.depth):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))(x)
    by_hand = model.head(model.norm(x).mean(axis=1))
    assert jnp.allclose(model(images), by_hand, rtol=1e-4, atol=1e-5)


def test_patches_are_squares_row_by_row():
    image = jnp.arange(64.0).reshape(1, 8, 8)
    patches = split_patches(image, SMALL)
    assert patches.shape == (1, 16, 4)
    assert patches[0, 1].tolist() == [2.0, 3.0, 10.0, 11.0]
    assert patches[0, 4].tolist() == [16.0, 17.0, 24.0, 25.0]
    assert jnp.array_equal(patches, split_patches(image[..., None], SMALL))


@pytest.mark.exhaustive
def test_moving_patches_changes_the_answer():
    model = VisionTransformer(SMALL, rngs=nnx.Rngs(0))
    images = jax.random.normal(jax.random.key(1), (3, 8, 8))
    assert not jnp.allclose(model(images), model(jnp.roll(images, 2, axis=1)), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"patch_size": 3}, "patch_size"), ({"num_heads": 3}, "num_heads"), ({"depth": 0}, "depth")],
)
def test_impossible_sizes_are_refused_when_the_config_is_built(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_images_of_another_size_are_refused_with_their_shape():
    with pytest.raises(ValueError, match=r"\(2, 9, 9\)"):
        split_patches(jnp.zeros((2, 9, 9)), SMALL)


@pytest.mark.slow
def test_the_mlp_has_the_given_sizes_and_no_activation_at_the_end():
    model = MLP([4, 6, 3], rngs=nnx.Rngs(0))
    assert [layer.kernel.shape for layer in model.layers] == [(4, 6), (6, 3)]
    assert (model(100 * jax.random.normal(jax.random.key(0), (50, 4))) < -1).any()
    with pytest.raises(ValueError, match="features"):
        MLP([4], rngs=nnx.Rngs(0))
