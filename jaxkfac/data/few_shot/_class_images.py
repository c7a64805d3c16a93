"""Images by class, and classes by split."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8


class ClassImages(NamedTuple):
    """Images of some classes, all of one size.

    Attributes:
        source: Where they come from, for errors.
        images: ``{class: (images, height, width, channels)}``, 0 to 255.
    """

    source: str
    images: Mapping[str, UInt8[np.ndarray, "images height width channels"]]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = next(iter(self.images.values())).shape[1:]
        return height, width, channels


class Splits(NamedTuple):
    """Three sets of classes, none of them in two.

    Attributes:
        train: To learn from.
        validation: To choose by.
        novel: To be measured on, once.
    """

    train: ClassImages
    validation: ClassImages
    novel: ClassImages


def split_classes(
    classes: ClassImages, *, seed: int = 0, fractions: tuple[float, float] = (0.2, 0.2)
) -> Splits:
    """Divide classes at random: whole classes, never the images of one.

    Args:
        classes: At least three.
        seed: Of the division; the same on every machine.
        fractions: Of the classes that go to validation and to novel, each at least one class.

    Raises:
        ValueError: too few classes for three splits, or fractions that leave none to train on.

    Example:
        >>> from jaxkfac.data.few_shot import load_glyphs
        >>> splits = split_classes(load_glyphs().train)
        >>> [len(split.images) for split in splits]
        [22, 8, 8]
    """
    if not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(f"fractions={fractions}: expected each in (0, 1)")
    names = sorted(classes.images)
    sizes = [max(1, round(fraction * len(names))) for fraction in fractions]
    if sum(sizes) >= len(names):
        raise ValueError(
            f"{classes.source} has {len(names)} classes, of which {sizes[0]} to validate and "
            f"{sizes[1]} novel ones leave none to train on"
        )
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(names))
    cuts = [sizes[0], sum(sizes)]
    validation, novel, train = (sorted(names[i] for i in part) for part in np.split(order, cuts))
    return Splits(
        *(
            ClassImages(f"{classes.source} ({title})", {n: classes.images[n] for n in part})
            for title, part in (("train", train), ("validation", validation), ("novel", novel))
        )
    )
