"""Networks that embed images: four convolutions, and residual networks of 10 to 34 layers."""

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxkfac._errors import at_least_one, one_of

# ---------------- batch normalisation within an episode


class EpisodeNorm(nnx.Module):
    """Batch normalisation over the images and pixels of each episode separately.

    With one episode it is batch normalisation as in PyTorch. With several, the episodes do not
    affect each other: the gradient of a batch of episodes is the accumulated gradient of these
    episodes, and the update of running statistics is the mean of theirs.

    Attributes:
        mean: Running mean, an ``nnx.BatchStat``, shape ``(features,)``.
        var: Running variance, the same; each contribution is divided by its count minus one.
        use_running_average: Whether to normalise with the running statistics; ``model.eval()``
            and ``model.train()`` set it.

    Example:
        >>> norm = EpisodeNorm(3)
        >>> x = jax.random.normal(jax.random.key(0), (2, 5, 8, 8, 3))
        >>> norm(4 * x + 1).std().round(2)
        Array(1., dtype=float32)

    References:
        S. Ioffe, C. Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing
        Internal Covariate Shift, 2015.
    """

    def __init__(self, features: int, *, momentum: float = 0.9, epsilon: float = 1e-5) -> None:
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.momentum, self.epsilon = momentum, epsilon
        self.use_running_average = False

    def __call__(self, x: Float[Array, "E *places C"]) -> Float[Array, "E *places C"]:
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            inside = tuple(range(1, x.ndim - 1))
            mean, var = x.mean(inside, keepdims=True), x.var(inside, keepdims=True)
            count = x[0, ..., 0].size
            self._average(self.mean, mean)
            self._average(self.var, var * (count / max(count - 1, 1)))
        # The scale multiplies rows of data, so that its curvature covers every pixel.
        normalised = (x - mean) * jax.lax.rsqrt(var + self.epsilon)
        return normalised * self.scale[...] + self.bias[...]

    def _average(self, running: nnx.BatchStat, new: Array) -> None:
        new = new.mean(range(new.ndim - 1)).astype(running[...].dtype)
        running[...] = self.momentum * running[...] + (1 - self.momentum) * new


# ---------------- four convolutions
#
# Shape suffixes: E episodes, I images, H height, W width, C channels, D features.


class Conv4(nnx.Module):
    """Four times convolution, batch normalisation, ReLU and 2 x 2 pooling; then flattened.

    The convolutions have no bias, which the normalisation would remove.

    Args:
        image_size: Height and width of the images in pixels, at least 16.
        channels: Channels of the images.
        width: Features of each convolution.
        rngs: Keys for the kernels.

    Attributes:
        features: Size of the output for an image: ``width (image_size // 16)**2``.

    Raises:
        ValueError: images have fewer than 16 pixels, so pooling would leave nothing.

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


# ---------------- residual networks of 10, 18 and 34 layers
#
# Shape suffixes: E episodes, I images, H height, W width, C channels, D features.


Depth = Literal[10, 18, 34]
Stem = Literal["large", "small"]
_BLOCKS: dict[int, tuple[int, ...]] = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class ResidualBlock(nnx.Module):
    """Two convolutions with a shortcut, which is projected if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.first = _convolution(inputs, outputs, 3, stride, rngs)
        self.first_norm = EpisodeNorm(outputs)
        self.second = _convolution(outputs, outputs, 3, 1, rngs)
        self.second_norm = EpisodeNorm(outputs)
        changes = stride > 1 or inputs != outputs
        self.shortcut = _convolution(inputs, outputs, 1, stride, rngs) if changes else None
        self.shortcut_norm = EpisodeNorm(outputs) if changes else None

    def __call__(self, x: Float[Array, "E I H W C"]) -> Array:
        residual = x
        if self.shortcut is not None and self.shortcut_norm is not None:
            residual = self.shortcut_norm(self.shortcut(x))
        x = jax.nn.relu(self.first_norm(self.first(x)))
        return jax.nn.relu(self.second_norm(self.second(x)) + residual)


class ResNet(nnx.Module):
    """A residual network without its classifier; returns the mean over pixels of each image.

    Args:
        depth: 10, 18 or 34 layers, including the classifier.
        channels: Channels of the images.
        width: Features of the first of four stages; each stage doubles them.
        stem: ``"large"``, for images of about 84 pixels or more: a 7 x 7 convolution and pooling,
            with stride 2 each. ``"small"``: a 3 x 3 convolution with stride 1, without pooling.
        rngs: Keys for the kernels.

    Attributes:
        features: Size of the output for an image: ``8 width``.

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
    """Maximum over 3 x 3 with stride 2 and one pixel of padding on each side, as in PyTorch."""
    window, strides = (1, 1, 3, 3, 1), (1, 1, 2, 2, 1)
    around = ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -math.inf, jax.lax.max, window, strides, around)


def _convolution(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    # Equal padding on both sides, as in PyTorch; "SAME" would pad one more on the right.
    around = ((size // 2, size // 2),) * 2
    return nnx.Conv(
        inputs, outputs, (size, size), strides=stride, padding=around, use_bias=False,
        kernel_init=_INIT, rngs=rngs,
    )  # fmt: skip
