"""Handwritten digits, embedded: real data without a download."""

import hashlib
import io
from importlib import resources
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

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

    The split is stratified: every class gives the same fraction of its examples to the
    test set, and to the validation set. The same ``seed`` gives the same split on every machine,
    and ``"train"``, ``"validation"`` and ``"test"`` of one seed are disjoint and together
    everything. The training set depends on the sum of the two fractions alone.

    Args:
        split: Which part.
        seed: Of the split; ``"all"`` ignores it and keeps the file's order.
        test_fraction: Part of each class that is held out for the test set, in (0, 1).
        validation_fraction: And for the validation set, in [0, 1); below 1 with the other.

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
    packed = resources.files("jaxkfac.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        pixels, classes = archive["images"], archive["labels"]
    digest = hashlib.sha256(pixels.tobytes() + classes.tobytes()).hexdigest()
    if digest != DIGITS_SHA256:
        raise ValueError(
            f"jaxkfac/data/digits.npz is damaged: sha256 {digest}, expected {DIGITS_SHA256}; "
            "reinstall jaxkfac"
        )
    return pixels, classes
