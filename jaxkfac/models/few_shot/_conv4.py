"""Four convolutions.

Shape suffixes: E episodes, I images, H height, W width, C channels, D features.
"""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxkfac._errors import at_least_one
from jaxkfac.models.few_shot._episode_norm import EpisodeNorm


class Conv4(nnx.Module):
    """Four times convolution, batch normalisation, ReLU and a pool of 2 x 2; then flattened.

    The convolutions have no bias, which the normalisation would take away again.

    Args:
        image_size: Height and width of the images, pixels, at least 16.
        channels: Channels of the images.
        width: Features of each convolution.
        rngs: Of the kernels.

    Attributes:
        features: Numbers that an image becomes: ``width (image_size // 16)**2``.

    Raises:
        ValueError: images of fewer than 16 pixels, of which the pools leave nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> model = Conv4(28, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 25, 28, 28, 1))).shape
        (1, 25, 64)

    References:
        O. Vinyals et al., Matching Networks for One Shot Learning, 2016.
    """

    def __init__(
        self, image_size: int, channels: int = 1, *, width: int = 64, rngs: nnx.Rngs
    ) -> None:
        at_least_one(channels=channels, width=width)
        if image_size < 16:
            raise ValueError(f"image_size={image_size}: expected at least 16, for four pools")
        inputs = (channels, width, width, width)
        init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.convolutions = nnx.List(
            nnx.Conv(n, width, (3, 3), use_bias=False, kernel_init=init, rngs=rngs) for n in inputs
        )
        self.norms = nnx.List(EpisodeNorm(width) for _ in inputs)
        self.features = width * (image_size // 16) ** 2

    def __call__(self, x_ExIxHxWxC: Float[Array, "E I H W C"]) -> Float[Array, "E I D"]:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x_ExIxHxWxC = jax.nn.relu(norm(convolution(x_ExIxHxWxC)))
            x_ExIxHxWxC = nnx.max_pool(x_ExIxHxWxC, (2, 2), strides=(2, 2))
        return x_ExIxHxWxC.reshape(*x_ExIxHxWxC.shape[:2], self.features)
