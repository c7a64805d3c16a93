import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxkfac.jobs.models import Conv4, ResNet


def shape_of(build, images):
    """Without computing anything."""
    return jax.eval_shape(lambda x: build(nnx.Rngs(0))(x), jnp.zeros(images)).shape


@pytest.mark.default(1, slow=0)
@pytest.mark.parametrize("depth", [10, 18, 34])
def test_the_depth_counts_convolutions_and_the_classifier_that_is_left_out(depth):
    model = nnx.eval_shape(lambda: ResNet(depth, width=2, rngs=nnx.Rngs(0)))
    kernels = [
        path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)) if "kernel" in path
    ]
    assert len([path for path in kernels if "shortcut" not in path]) + 1 == depth


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("build", "images", "features"),
    [
        (lambda rngs: Conv4(84, 3, rngs=rngs), (1, 2, 84, 84, 3), 1600),
        (lambda rngs: Conv4(31, width=8, rngs=rngs), (2, 3, 31, 31, 1), 8),
        (lambda rngs: ResNet(18, rngs=rngs), (1, 2, 84, 84, 3), 512),
        (lambda rngs: ResNet(34, 1, stem="small", rngs=rngs), (1, 2, 28, 28, 1), 512),
    ],
)
def test_an_image_becomes_as_many_numbers_as_features_says(build, images, features):
    assert nnx.eval_shape(lambda: build(nnx.Rngs(0))).features == features
    assert shape_of(build, images) == (*images[:2], features)


def test_what_no_network_can_be_built_of_is_refused():
    with pytest.raises(ValueError, match="image_size=15: expected at least 16"):
        Conv4(15, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="width=0"):
        Conv4(28, width=0, rngs=nnx.Rngs(0))
