"""Prototypical networks.

Shape suffixes: E episodes, N classes, K images of a class, Q queries, H height, W width,
C channels, I images, D features.
"""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


@runtime_checkable
class Backbone(Protocol):
    """What turns images into features, such as :class:`Conv4` and :class:`ResNet`."""

    features: int

    def __call__(self, images: Float[Array, "E I H W C"], /) -> Float[Array, "E I D"]: ...


class PrototypicalNetwork(nnx.Module):
    """A class is the mean of its support; the logits are minus the squared distances to it.

    It has no parameters but the backbone's, and takes any number of classes and images.

    Example:
        >>> from jaxkfac.models import Conv4
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
    """Features of an episode's images, all of which go through the backbone together."""
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
