"""Handwritten digits, embedded: real data without a download."""

import io
from importlib import resources
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxkfac.files import check_sha256

# ---------------- the examples of a step: a pure function of a seed and an epoch


def num_batches(num_examples: int, batch_size: int) -> int:
    """Number of full batches in one pass over the data; an incomplete last one is dropped.

    Raises:
        ValueError: ``batch_size`` is not in ``1 .. num_examples``.
    """
    if not 1 <= batch_size <= num_examples:
        raise ValueError(f"batch_size must lie in 1 .. {num_examples} (examples), not {batch_size}")
    return num_examples // batch_size


def epoch_batches(
    seed: int, epoch: int, *, num_examples: int, batch_size: int
) -> Int[np.ndarray, "batches batch_size"]:
    """Indices of all batches of an epoch, in a new random order.

    Calls do not depend on each other: step ``t`` of a run is row
    ``t % num_batches`` of epoch ``t // num_batches``, so a run can resume from its step
    number alone. The examples after the last full batch differ from epoch to epoch.

    Args:
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        num_examples: Size of the data set.
        batch_size: Examples per batch.

    Returns:
        ``(num_batches, batch_size)`` int32 without repeated indices.

    Raises:
        ValueError: ``batch_size`` is not in ``1 .. num_examples``, or ``epoch`` is negative.

    Example:
        >>> epoch_batches(0, 3, num_examples=10, batch_size=4).shape
        (2, 4)
    """
    rows = num_batches(num_examples, batch_size)
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, not {epoch}")
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    order = rng.permutation(num_examples)[: rows * batch_size]
    return order.reshape(rows, batch_size).astype(np.int32)


# ---------------- the digits


DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
"""Digest of the bytes of all images followed by the bytes of all labels."""


class Digits(NamedTuple):
    """Images in [0, 1] and their classes, on the host or on a device."""

    images: Float[np.ndarray | Array, "examples 8 8"]
    labels: Int[np.ndarray | Array, " examples"]


def load_digits(
    split: Literal["train", "validation", "test", "all"] = "all",
    *,
    seed: int = 0,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
) -> Digits:
    """The 1797 digits of the UCI repository, 8 x 8 pixels, scaled to [0, 1].

    The split is stratified: each class contributes the same fraction of its examples to the
    test set, and to the validation set. The same ``seed`` gives the same split on every machine;
    for one seed, ``"train"``, ``"validation"`` and ``"test"`` are disjoint and together contain
    all examples. The training set depends only on the sum of the two fractions.

    Args:
        split: Which part to return.
        seed: Seed of the split; not used for ``"all"``, which keeps the order of the file.
        test_fraction: Fraction of each class in the test set, in (0, 1).
        validation_fraction: Fraction in the validation set, in [0, 1); the sum must be below 1.

    Returns:
        Images ``(examples, 8, 8)`` float32 and labels ``(examples,)`` int32.

    Raises:
        ValueError: ``split`` or a fraction is out of range, or the embedded file
            does not have the digest ``DIGITS_SHA256``.

    Example:
        >>> images, labels = load_digits("test", seed=0)
        >>> images.shape, labels.shape
        ((359, 8, 8), (359,))

    References:
        E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
        Learning Repository, 1998, https://doi.org/10.24432/C50P49, CC BY 4.0.
    """
    if split not in ("train", "validation", "test", "all"):
        raise ValueError(f'split must be "train", "validation", "test" or "all", not {split!r}')
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(f"test_fraction must lie in (0, 1), not {test_fraction}")
    if not 0.0 <= validation_fraction < 1.0 - test_fraction:
        raise ValueError(
            f"validation_fraction must lie in [0, {1.0 - test_fraction:g}), beside "
            f"test_fraction={test_fraction:g}, not {validation_fraction}"
        )
    pixels, classes = _read()
    images, labels = pixels.astype(np.float32) / np.float32(16), classes.astype(np.int32)
    if split == "all":
        return Digits(images, labels)
    rng = np.random.Generator(np.random.Philox(seed))
    parts = np.full(len(labels), "train", dtype="<U10")
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out = members[: round((test_fraction + validation_fraction) * len(members))]
        parts[held_out] = "test"
        parts[held_out[: round(validation_fraction * len(members))]] = "validation"
    return Digits(images[parts == split], labels[parts == split])


def _read() -> tuple[np.ndarray, np.ndarray]:
    packed = resources.files("jaxkfac.jobs.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        pixels, classes = archive["images"], archive["labels"]
    data = pixels.tobytes() + classes.tobytes()
    check_sha256(data, DIGITS_SHA256, "jaxkfac/jobs/data/digits.npz")
    return pixels, classes


# ---------------- random shifts of images, for augmentation of the digits


def shift_batch(
    key: Key[Array, ""], images: Float[Array, "batch height width"], max_shift: int = 1
) -> Float[Array, "batch height width"]:
    """Shift each image by a random number of whole pixels, filling with zeros.

    Both shifts of each image are uniform in ``-max_shift .. max_shift``. Pixels that leave the
    image are lost. A pure function that works in ``jit`` and ``scan``.

    Args:
        key: Random key, which determines the shifts.
        images: ``(batch, height, width)``, any float dtype.
        max_shift: Largest shift in pixels, static; 0 returns the images unchanged.

    Returns:
        The shifted images, with the same shape and dtype.

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
