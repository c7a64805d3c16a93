"""Letters and digits in many faces, embedded: images by class without a download."""

import hashlib
import io
from importlib import resources

import numpy as np

from jaxkfac.data.few_shot._class_images import ClassImages, Splits

GLYPHS_SHA256 = "959dbc935b8fd5b792b44449af68c98623bacf6c9af6711b573d1678f5d0f982"
"""Digest of the bytes of the archive's arrays, in their order."""

_LEVELS = 15  # of gray beside black
_SPLITS = ("train", "validation", "novel")


def load_glyphs() -> Splits:
    """62 letters and digits, 28 x 28 pixels: no class and no typeface is in two splits.

    Capital and small letters are classes of their own. Characters that look alike (0, O and o)
    are in one split. Each class is drawn in every face of its split, turned, slanted, scaled and
    moved at random.

    Returns:
        38 classes of 128 images to train on, 10 of 36 to validate with and 14 of 40 novel ones;
        ``jaxkfac/data/glyphs.txt`` names the faces, their licences and the distortions.

    Raises:
        ValueError: the embedded file does not have the digest ``GLYPHS_SHA256``.

    Example:
        >>> splits = load_glyphs()
        >>> sum(len(split.images) for split in splits)
        62
        >>> "".join(splits.novel.images)
        '34FJMUVWejmuvw'
        >>> splits.novel.images["e"].shape
        (40, 28, 28, 1)
    """
    packed = resources.files("jaxkfac.data").joinpath("glyphs.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    digest = hashlib.sha256(b"".join(x.tobytes() for x in arrays.values())).hexdigest()
    if digest != GLYPHS_SHA256:
        raise ValueError(
            f"jaxkfac/data/glyphs.npz is damaged: sha256 {digest}, expected {GLYPHS_SHA256}; "
            "reinstall jaxkfac"
        )
    return Splits(*(_split(arrays, name) for name in _SPLITS))


def _split(arrays: dict[str, np.ndarray], split: str) -> ClassImages:
    pixels, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    pixels = (pixels * (255 // _LEVELS))[..., None]
    names = bytes(arrays[f"{split}_names"]).decode("ascii")
    return ClassImages(
        f"glyphs ({split})", {name: pixels[labels == i] for i, name in enumerate(names)}
    )
