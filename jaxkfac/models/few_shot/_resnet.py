"""Residual networks of 10, 18 and 34 layers.

Shape suffixes: E episodes, I images, H height, W width, C channels, D features.
"""

import math
from typing import Literal, get_args

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxkfac._errors import at_least_one, one_of
from jaxkfac.models.few_shot._episode_norm import EpisodeNorm

Depth = Literal[10, 18, 34]
Stem = Literal["large", "small"]
_BLOCKS: dict[int, tuple[int, ...]] = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResidualBlock(nnx.Module):
    """Two convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.first = _convolution(inputs, outputs, 3, stride, rngs)
        self.first_norm = EpisodeNorm(outputs)
        self.second = _convolution(outputs, outputs, 3, 1, rngs)
        self.second_norm = EpisodeNorm(outputs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = _convolution(inputs, outputs, 1, stride, rngs) if changes else None
        self.shortcut_norm = EpisodeNorm(outputs) if changes else None

    def __call__(self, x: Float[Array, "E I H W C"]) -> Array:
        short = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            short = self.shortcut_norm(self.shortcut(x))
        x = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(self.second_norm(self.second(x)) + short)


class ResNet(nnx.Module):
    """A residual network without its classifier: each image becomes its mean over places.

    Args:
        depth: 10, 18 or 34 layers, the classifier counted in.
        channels: Channels of the images.
        width: Features of the first of the four stages, each of which doubles them.
        stem: ``"large"``, of images of about 84 pixels or more: a convolution of 7 x 7 and a pool,
            stride 2 each. ``"small"``: a convolution of 3 x 3, without stride or pool.
        rngs: Of the kernels.

    Attributes:
        features: Numbers that an image becomes: ``8 width``.

    Example:
        >>> import jax.numpy as jnp
        >>> model = ResNet(10, channels=1, width=4, stem="small", rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 5, 16, 16, 1))).shape
        (1, 5, 32)

    References:
        K. He et al., Deep Residual Learning for Image Recognition, 2016.
    """

    def __init__(
        self,
        depth: Depth,
        channels: int = 3,
        *,
        width: int = 64,
        stem: Stem = "large",
        rngs: nnx.Rngs,
    ) -> None:
        one_of("depth", depth, get_args(Depth))
        one_of("stem", stem, get_args(Stem))
        at_least_one(channels=channels, width=width)
        size, stride = (7, 2) if stem == "large" else (3, 1)
        self.stem = _convolution(channels, width, size, stride, rngs)
        self.stem_norm, self.pools = EpisodeNorm(width), stem == "large"
        self.blocks = nnx.List()
        inputs = width
        for stage, number in enumerate(_BLOCKS[depth]):
            for i in range(number):
                outputs, stride = width * 2**stage, 2 if stage and not i else 1
                self.blocks.append(ResidualBlock(inputs, outputs, stride, rngs=rngs))
                inputs = outputs
        self.features = inputs

    def __call__(self, x_ExIxHxWxC: Float[Array, "E I H W C"]) -> Float[Array, "E I D"]:
        x_ExIxHxWxC = jax.nn.relu(self.stem_norm(self.stem(x_ExIxHxWxC)))
        if self.pools:
            x_ExIxHxWxC = _pool(x_ExIxHxWxC)
        for block in self.blocks:
            x_ExIxHxWxC = block(x_ExIxHxWxC)
        return x_ExIxHxWxC.mean((2, 3))


def _pool(x: Array) -> Array:
    """The largest of 3 x 3, stride 2, one pixel added on each side as PyTorch does."""
    window, strides = (1, 1, 3, 3, 1), (1, 1, 2, 2, 1)
    around = ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -math.inf, jax.lax.max, window, strides, around)


def _convolution(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    # As many pixels on either side, as PyTorch pads; "SAME" would add one more on the right.
    around = ((size // 2, size // 2),) * 2
    return nnx.Conv(
        inputs, outputs, (size, size), strides=stride, padding=around, use_bias=False,
        kernel_init=_INIT, rngs=rngs,
    )  # fmt: skip
