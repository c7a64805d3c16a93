"""Classifiers for queries of an episode: prototypes, and the cosine transformer."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxkfac._errors import at_least_one

# ---------------- prototypical networks
#
# Shape suffixes: E episodes, N classes, K images of a class, Q queries, H height, W width,
# C channels, I images, D features.


@runtime_checkable
class Backbone(Protocol):
    """A network from images to features, such as :class:`Conv4` and :class:`ResNet`."""

    features: int

    def __call__(self, images: Float[Array, "E I H W C"], /) -> Float[Array, "E I D"]: ...


class PrototypicalNetwork(nnx.Module):
    """Each class is the mean of its support; logits are minus the squared distances to it.

    It has only the backbone's parameters, and works with any number of classes and images.

    Example:
        >>> from jaxkfac.jobs.models import Conv4
        >>> model = PrototypicalNetwork(Conv4(16, width=8, rngs=nnx.Rngs(0)))
        >>> model(jnp.zeros((1, 5, 2, 16, 16, 1)), jnp.zeros((1, 10, 16, 16, 1))).shape
        (1, 10, 5)

    References:
        J. Snell, K. Swersky, R. Zemel, Prototypical Networks for Few-shot Learning, 2017.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def __call__(
        self, support: Float[Array, "E N K H W C"], query: Float[Array, "E Q H W C"]
    ) -> Float[Array, "E Q N"]:
        support_ExNxKxD, query_ExQxD = embed(self.backbone, support, query)
        prototypes_ExNxD = support_ExNxKxD.mean(2)
        return -jnp.square(query_ExQxD[:, :, None] - prototypes_ExNxD[:, None]).sum(-1)


def embed(
    backbone: Backbone, support: Float[Array, "E N K H W C"], query: Float[Array, "E Q H W C"]
) -> tuple[Float[Array, "E N K D"], Float[Array, "E Q D"]]:
    """Features of an episode's images; all go through the backbone together."""
    if support.ndim != 6 or query.ndim != 5 or support.shape[3:] != query.shape[2:]:
        raise ValueError(
            "expected support (episodes, classes, images, H, W, C) and query (episodes, images, "
            f"H, W, C), got {support.shape} and {query.shape}"
        )
    episodes, classes, shots, *image = support.shape
    flat = support.reshape(episodes, classes * shots, *image)
    features = backbone(jnp.concatenate([flat, query], axis=1))
    of_support, of_query = jnp.split(features, [classes * shots], axis=1)
    return of_support.reshape(episodes, classes, shots, -1), of_query


# ---------------- the few-shot cosine transformer
#
# Shape suffixes: E episodes, N classes, K images of a class, Q queries, D features, A heads,
# S size of a head.


_SCALE = 2.0  # of the cosines of the head, in addition to a learnable norm


@dataclasses.dataclass(frozen=True)
class CosineTransformerConfig:
    """Sizes of a few-shot cosine transformer; defaults are those of the paper.

    Attributes:
        n_way: Classes per episode.
        k_shot: Images per class.
        depth: Number of times the block, whose parameters are shared, is applied.
        num_heads: Number of attention heads.
        head_size: Size of a head.
        hidden: Hidden size of the block.
    """

    n_way: int
    k_shot: int
    depth: int = 1
    num_heads: int = 8
    head_size: int = 64
    hidden: int = 512

    def __post_init__(self) -> None:
        at_least_one(**dataclasses.asdict(self))


class CosineAttention(nnx.Module):
    """Each class attends to one query: the value of a head times the cosine of the two.

    ``M`` is 1 for prototypes that all queries share, and otherwise ``Q``.

    There is a single key, the query itself, so no softmax is used; one projection computes
    queries, keys and values.
    """

    def __init__(self, width: int, config: CosineTransformerConfig, *, rngs: nnx.Rngs) -> None:
        inner = config.num_heads * config.head_size
        self.heads = (config.num_heads, config.head_size)
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.input = nnx.Linear(width, inner, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(inner, width, rngs=rngs)

    def __call__(
        self, classes: Float[Array, "E M N D"], query: Float[Array, "E Q 1 D"]
    ) -> Float[Array, "E Q N D"]:
        c_ExMxNxAxS = self._projected(classes)
        q_ExQx1xAxS = self._projected(query)
        c_ExQxNxAxS = jnp.broadcast_to(
            _unit(c_ExMxNxAxS), (*q_ExQx1xAxS.shape[:2], *c_ExMxNxAxS.shape[2:])
        )
        # An einsum, not a product and a sum: XLA's CPU compiler (jax 0.10.2) fuses those with the
        # projection after them, and the results are wrong for more than 12 queries.
        cosines = jnp.einsum("eqnas,eqas->eqna", c_ExQxNxAxS, _unit(q_ExQx1xAxS)[:, :, 0])[
            ..., None
        ]
        mixed_ExQxNxAxS = cosines * q_ExQx1xAxS
        return self.output(mixed_ExQxNxAxS.reshape(*mixed_ExQxNxAxS.shape[:3], -1))

    def _projected(self, x: Array) -> Array:
        return self.input(self.norm(x)).reshape(*x.shape[:-1], *self.heads)


class CosineHead(nnx.Module):
    """A number for each row: a multiple of its cosine with a learned direction."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        direction = init(rngs.params(), (width, 1))
        self.direction = nnx.Param(direction)
        self.norm = nnx.Param(jnp.linalg.norm(direction, axis=0))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
        direction = self.direction[...]
        kernel = direction * (self.norm[...] / jnp.linalg.norm(direction, axis=0))
        return _SCALE * (_unit(x) @ kernel)[..., 0]


class CosineTransformer(nnx.Module):
    """Learnable prototypes, cosine attention between them and each query, a cosine head.

    A prototype is a weighted mean of the support of its class; the weights are a softmax of
    parameters, one for each class and image, so ``n_way`` and ``k_shot`` are fixed by the model.

    Args:
        backbone: A network from images to features, such as :class:`Conv4` and :class:`ResNet`.
        config: Sizes of the episodes and of the layers after the backbone.
        rngs: Keys for the parameters.

    Example:
        >>> from jaxkfac.jobs.models import Conv4
        >>> rngs = nnx.Rngs(0)
        >>> config = CosineTransformerConfig(n_way=3, k_shot=2, num_heads=2, head_size=4, hidden=8)
        >>> model = CosineTransformer(Conv4(16, width=8, rngs=rngs), config, rngs=rngs)
        >>> model(jnp.zeros((1, 3, 2, 16, 16, 1)), jnp.zeros((1, 9, 16, 16, 1))).shape
        (1, 9, 3)

    References:
        Q.-H. Nguyen, C. Q. Nguyen, D. D. Le, H. H. Pham, Enhancing Few-Shot Image Classification
        With Cosine Transformer, 2023.
    """

    def __init__(
        self, backbone: Backbone, config: CosineTransformerConfig, *, rngs: nnx.Rngs
    ) -> None:
        width, self.config = backbone.features, config
        self.backbone = backbone
        self.support_weights = nnx.Param(jnp.ones((config.n_way, config.k_shot)))
        self.attention = CosineAttention(width, config, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, width, rngs=rngs)
        self.head_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.head_input = nnx.Linear(width, config.head_size, rngs=rngs)
        self.head = CosineHead(config.head_size, rngs=rngs)

    def __call__(
        self, support: Float[Array, "E N K H W C"], query: Float[Array, "E Q H W C"]
    ) -> Float[Array, "E Q N"]:
        expected = (self.config.n_way, self.config.k_shot)
        if support.shape[1:3] != expected:
            raise ValueError(
                f"expected episodes of {expected[0]} classes with {expected[1]} images, which the "
                f"support's weights are for, got support of shape {support.shape}"
            )
        support_ExNxKxD, query_ExQxD = embed(self.backbone, support, query)
        weights_NxK = jax.nn.softmax(self.support_weights[...], axis=1)
        x_ExQxNxD = (support_ExNxKxD * weights_NxK[..., None]).sum(2)[:, None]
        query_ExQx1xD = query_ExQxD[:, :, None]
        for _ in range(self.config.depth):
            x_ExQxNxD = self.attention(x_ExQxNxD, query_ExQx1xD) + x_ExQxNxD
            x_ExQxNxD = self.down(jax.nn.gelu(self.up(self.norm(x_ExQxNxD)), approximate=False)) + (
                x_ExQxNxD
            )
        return self.head(self.head_input(self.head_norm(x_ExQxNxD)))


def _unit(x: Array) -> Array:
    """Divide by the length; zero stays zero, with a finite gradient."""
    square = jnp.square(x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
