"""Small networks, and layers that larger ones share."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxkfac.linalg import statistics_dtype

# ---------------- dense layers with a nonlinearity between them


class MLP(nnx.Module):
    """``features[0] -> ... -> features[-1]``; leading axes of the input are batch axes.

    Example:
        >>> model = MLP([64, 32, 10], rngs=nnx.Rngs(0))
        >>> model(jax.numpy.zeros((5, 64))).shape
        (5, 10)
    """

    def __init__(
        self,
        features: Sequence[int],
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        rngs: nnx.Rngs,
    ) -> None:
        if len(features) < 2:
            raise ValueError(f"features needs an input and an output size, not {list(features)}")
        self.activation = activation
        self.layers = nnx.List(
            nnx.Linear(i, o, rngs=rngs) for i, o in zip(features, features[1:], strict=False)
        )

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)


# ---------------- root mean square norm


class RMSNorm(nnx.Module):
    """Divide by the root mean square, computed in float32 or wider, then scale.

    With ``unit_offset`` the factor is 1 + scale, and it is also applied in float32.
    """

    def __init__(self, width: int, epsilon: float, *, unit_offset: bool = False) -> None:
        self.epsilon, self.unit_offset = epsilon, unit_offset
        self.scale = nnx.Param(jnp.zeros(width) if unit_offset else jnp.ones(width))

    def __call__(self, x_BxTxD: Array) -> Array:
        wide = x_BxTxD.astype(statistics_dtype(x_BxTxD.dtype))
        root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        if self.unit_offset:
            scale = 1 + self.scale[...].astype(wide.dtype)
            return (wide * root * scale).astype(x_BxTxD.dtype)
        return (wide * root).astype(x_BxTxD.dtype) * self.scale[...]


# ---------------- token ids to rows of a table, and back to logits if the head is tied


class TokenEmbedding(nnx.Module):
    """The embedding of tokens, also the head if it is tied; in the dtype of the parameter.

    An id outside the vocabulary is refused where its value is at hand, and gives NaN in a compiled
    program. A negative one does not count from the end.

    Raises:
        ValueError: an id is outside the vocabulary.
    """

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (vocabulary, width)))

    def __call__(self, ids_BxT: Array) -> Array:
        table = self.embedding[...]
        if not isinstance(ids_BxT, Tracer) and ids_BxT.size:
            on_host = np.asarray(ids_BxT)  # in NumPy: inside a trace, jnp would stage the minimum
            least, most = int(on_host.min()), int(on_host.max())
            if least < 0 or most >= len(table):
                raise ValueError(
                    f"ids: expected [0, {len(table)}), the rows of the embedding, got ids from "
                    f"{least} to {most}"
                )
        return table.at[ids_BxT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)

    def attend(self, x: Array) -> Array:
        return x @ self.embedding[...].T


# ---------------- a small vision transformer
#
# Shape suffixes: B batch, H height, W width, C channels, L patches, P pixels of a patch,
# D width of the stream, F width of the hidden layer, K classes.


@dataclasses.dataclass(frozen=True)
class VisionTransformerConfig:
    """Sizes of a vision transformer; the defaults suit 8 x 8 digits.

    Attributes:
        image_size: Height and width of the images in pixels.
        channels: Channels of the images; for one channel the axis may be omitted.
        patch_size: Height and width of a patch; divides ``image_size``.
        width: Size of the residual stream; a multiple of ``num_heads``.
        depth: Number of blocks.
        num_heads: Attention heads.
        hidden: Hidden size of the two dense layers of each block.
        num_classes: Size of the output.
        remat: Recompute each block's activations in the backward pass.
    """

    image_size: int = 8
    channels: int = 1
    patch_size: int = 2
    width: int = 64
    depth: int = 2
    num_heads: int = 4
    hidden: int = 128
    num_classes: int = 10
    remat: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1 and field.name != "remat":
                raise ValueError(f"{field.name} must be at least 1, not {value}")
        if self.image_size % self.patch_size:
            raise ValueError(f"patch_size {self.patch_size} must divide {self.image_size=}")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} must divide {self.width=}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class VisionBlock(nnx.Module):
    """Attention, then two dense layers; each normalizes its input and adds to the stream."""

    def __init__(self, config: VisionTransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.num_heads, config.width, decode=False, rngs=rngs, keep_rngs=False
        )
        self.dense_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x_BxLxD: Array) -> Array:
        x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD))
        h_BxLxF = jax.nn.gelu(self.up(self.dense_norm(x_BxLxD)))
        return x_BxLxD + self.down(h_BxLxF)


class VisionTransformer(nnx.Module):
    """Patches, positions, scanned blocks with remat, mean over patches, head.

    Example:
        >>> model = VisionTransformer(VisionTransformerConfig(), rngs=nnx.Rngs(0))
        >>> model(jax.numpy.zeros((5, 8, 8))).shape
        (5, 10)

    References:
        A. Dosovitskiy et al., An Image is Worth 16x16 Words: Transformers for Image
        Recognition at Scale, 2021.
    """

    def __init__(self, config: VisionTransformerConfig, *, rngs: nnx.Rngs) -> None:
        patch_pixels = config.patch_size**2 * config.channels
        self.config = config
        self.patch = nnx.Linear(patch_pixels, config.width, rngs=rngs)
        # As large as the patch embeddings: with 0.02, as in large models, training on the digits
        # took twice as many epochs to reach the same loss: averaging over patches loses positions.
        shape_LxD = (config.num_patches, config.width)
        positions_LxD = 0.5 * jax.random.normal(rngs.params(), shape_LxD)
        self.positions = nnx.Param(positions_LxD)

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> VisionBlock:
            return VisionBlock(config, rngs=rngs)

        self.blocks = stacked_blocks(rngs)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.num_classes, rngs=rngs)

    def __call__(self, images: Float[Array, "B H W *C"]) -> Float[Array, "B K"]:
        patches_BxLxP = split_patches(images, self.config)
        x_BxLxD = self.patch(patches_BxLxP) + self.positions[...]

        def step(x_BxLxD: Array, block: VisionBlock) -> Array:
            return block(x_BxLxD)

        if self.config.remat:
            step = nnx.remat(step)
        scan = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        x_BxLxD = scan(x_BxLxD, self.blocks)
        return self.head(self.norm(x_BxLxD).mean(axis=1))


def split_patches(images: Array, config: VisionTransformerConfig) -> Array:
    """``(B, H, W[, C])`` to ``(B, L, P)``, row by row."""
    expected = (config.image_size, config.image_size)
    if images.shape[1:3] != expected or images.ndim not in (3, 4):
        raise ValueError(f"expected images of shape (batch, {expected}[, C]), got {images.shape}")
    patches_per_side, size = config.image_size // config.patch_size, config.patch_size
    x = images.reshape(-1, patches_per_side, size, patches_per_side, size, config.channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(
        -1, patches_per_side * patches_per_side, size * size * config.channels
    )
