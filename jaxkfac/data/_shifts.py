"""Random shifts of images: the augmentation of the digits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def shift_batch(
    key: Key[Array, ""], images: Float[Array, "batch height width"], max_shift: int = 1
) -> Float[Array, "batch height width"]:
    """Move every image by its own whole number of pixels, filling with zeros.

    Both shifts of each image are drawn uniformly from ``-max_shift .. max_shift``. Pixels
    pushed over the edge are lost. A pure function, to be used inside ``jit`` and ``scan``.

    Args:
        key: Random key; the shifts depend on nothing else.
        images: ``(batch, height, width)``, any float dtype.
        max_shift: Largest shift in pixels, static; 0 returns the images as they are.

    Returns:
        The shifted images, same shape and dtype.

    Raises:
        ValueError: ``max_shift`` is negative.

    Example:
        >>> shift_batch(jax.random.key(0), jnp.ones((2, 8, 8))).shape
        (2, 8, 8)
    """
    if max_shift < 0:
        raise ValueError(f"max_shift must not be negative, not {max_shift}")
    if max_shift == 0:
        return images
    batch, height, width = images.shape
    margin = (max_shift, max_shift)
    padded = jnp.pad(images, ((0, 0), margin, margin))
    starts = jax.random.randint(key, (batch, 2), 0, 2 * max_shift + 1)
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, at, (height, width)))(
        padded, starts
    )
