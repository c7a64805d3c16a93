"""Images by class and by split, and episodes with a few images of a few classes."""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from jaxkfac._errors import at_least_one, installed_by, one_of
from jaxkfac.files import check_sha256

__all__ = [
    "GLYPHS_SHA256",
    "ClassImages",
    "Episode",
    "Episodes",
    "Splits",
    "load_glyphs",
    "read_class_folder",
    "read_splits",
    "split_classes",
]

# ---------------- images by class, and classes by split


class ClassImages(NamedTuple):
    """Images of some classes, all of the same size.

    Attributes:
        source: Where the images come from, for error messages.
        images: ``{class: (images, height, width, channels)}``, 0 to 255.
    """

    source: str
    images: Mapping[str, UInt8[np.ndarray, "images height width channels"]]


class Splits(NamedTuple):
    """Three disjoint sets of classes.

    Attributes:
        train: Classes for training.
        validation: Classes for model selection.
        novel: Classes for the final evaluation.
    """

    train: ClassImages
    validation: ClassImages
    novel: ClassImages


def split_classes(
    classes: ClassImages, *, seed: int = 0, fractions: tuple[float, float] = (0.2, 0.2)
) -> Splits:
    """Divide classes at random; the images of a class stay together.

    Args:
        classes: At least three classes.
        seed: Seed of the division, the same on every machine.
        fractions: Fractions of classes for validation and for novel, at least one class each.

    Raises:
        ValueError: there are too few classes for three splits, or none left for training.

    Example:
        >>> from jaxkfac.jobs.data.few_shot import load_glyphs
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


# ---------------- images from a folder for each class


_ENDINGS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
_LONGEST = 256  # ratio of the longer to the shorter side
_SPLIT_FOLDERS = (("train",), ("validation", "val", "valid", "dev"), ("novel", "test"))


def read_class_folder(
    folder: Path | str, *, image_size: int = 84, channels: Literal[1, 3] = 3
) -> ClassImages:
    """Read a folder of folders, each with the images of one class.

    An image is scaled until it covers the square, and cropped at the center. Files and folders
    whose names start with a dot, and files without an image suffix, are ignored.

    Args:
        folder: Contains ``class/image``; the name of the inner folder is the class.
        image_size: Height and width of the result in pixels.
        channels: 1 for gray, 3 for color.

    Returns:
        All images, ``image_size**2 * channels`` bytes each, in the order of their names.

    Raises:
        FileNotFoundError: there is no such folder, no class in it, or no image in a class.
        ValueError: a file cannot be decoded; names it.
        ModuleNotFoundError: Pillow is not installed.

    Memory:
        All images: 60,000 images of 84 x 84 in color take 1.3 GB.
    """
    at_least_one(image_size=image_size)
    one_of("channels", channels, (1, 3))
    decoder = _pillow()
    folder = _existing(Path(folder))
    images = {}
    for inner in _folders(folder):
        files = sorted(p for p in inner.iterdir() if _is_image(p))
        if not files:
            raise FileNotFoundError(f"the class folder {inner} holds no image{_ends()}")
        images[inner.name] = np.stack(
            [_decoded(decoder, path, image_size, channels) for path in files]
        )
    if not images:
        contents = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{folder} has no folder for a class; it holds {contents}. "
            f"Expected {folder}/CLASS/IMAGE"
        )
    return ClassImages(str(folder), images)


def read_splits(
    folder: Path | str, *, image_size: int = 84, channels: Literal[1, 3] = 3, seed: int = 0
) -> Splits:
    """Read ``folder/train``, ``validation`` and ``novel``, or divide one folder.

    Args:
        folder: Contains three folders with these names (or ``val``, ``valid``, ``dev`` and
            ``test``), each as for :func:`read_class_folder`; or is one such folder, whose
            classes are divided at random (:func:`split_classes`).
        image_size: See :func:`read_class_folder`.
        channels: See :func:`read_class_folder`.
        seed: Seed of the division.

    Raises:
        ValueError: one of the three is missing, or a class is in two of them; or see
            :func:`read_class_folder`.
    """
    folder = _existing(Path(folder))
    options: dict[str, Any] = {"image_size": image_size, "channels": channels}
    split_folders = [
        [folder / name for name in names if (folder / name).is_dir()] for names in _SPLIT_FOLDERS
    ]
    if not any(split_folders):
        return split_classes(read_class_folder(folder, **options), seed=seed)
    if not all(len(folders) == 1 for folders in split_folders):
        wanted = "; ".join(" or ".join(names) for names in _SPLIT_FOLDERS)
        raise ValueError(
            f"{folder} has some folders of splits: expected one of each, {wanted}, or folders of "
            "classes alone"
        )
    splits = Splits(*(read_class_folder(one, **options) for (one,) in split_folders))
    for i, one in enumerate(splits):
        for other in splits[i + 1 :]:
            if both := sorted(one.images.keys() & other.images.keys()):
                raise ValueError(f"the class {both[0]!r} is in {one.source} and in {other.source}")
    return splits


def _pillow() -> Any:
    with installed_by("images", needs="reading image files needs Pillow"):
        from PIL import Image
    return Image


def _decoded(decoder: Any, path: Path, size: int, channels: int) -> np.ndarray:
    try:
        with decoder.open(path) as file:
            width, height = file.size
            if max(width, height) > _LONGEST * min(width, height):  # the scaled image would be huge
                raise ValueError(f"it has {width} x {height} pixels")
            image = _eight_bits(file).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # a decoder for a hundred formats can raise anything
        (what, *_) = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} does not decode as an image ({what})") from error
    scale = size / min(image.size)
    width, height = (max(size, round(scale * side)) for side in image.size)
    image = image.resize((width, height), decoder.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    return np.asarray(image).reshape(size, size, channels)


def _eight_bits(file: Any) -> Any:
    """An image upright, on white if it is transparent, with eight bits per channel."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, np.float64)
        maximum = 65535 if image.mode != "F" else 1 if values.max(initial=0) <= 1 else 255
        return Image.fromarray(np.clip(255 / maximum * values, 0, 255).round().astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"expected a folder of classes at {folder}, which {what}")
    return folder


def _folders(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _ENDINGS and not path.name.startswith(".")


def _ends() -> str:
    return f" (files that end in {', '.join(sorted(_ENDINGS))})"


# ---------------- letters and digits in many typefaces, embedded: images without a download


GLYPHS_SHA256 = "959dbc935b8fd5b792b44449af68c98623bacf6c9af6711b573d1678f5d0f982"
"""Digest of the bytes of the archive's arrays, in their order."""

_LEVELS = 15  # levels of gray in addition to black
_SPLIT_NAMES = ("train", "validation", "novel")


def load_glyphs() -> Splits:
    """62 letters and digits, 28 x 28 pixels; splits share no class and no typeface.

    Upper and lower case letters are separate classes. Characters that look similar (0, O and o)
    are in the same split. Each class is drawn in every typeface of its split, with random
    rotation, slant, scale and translation.

    Returns:
        38 classes of 128 images for training, 10 of 36 for validation and 14 of 40 novel ones;
        ``jaxkfac/jobs/data/glyphs.txt`` lists the typefaces, their licences and the distortions.

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
    packed = resources.files("jaxkfac.jobs.data").joinpath("glyphs.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    data = b"".join(x.tobytes() for x in arrays.values())
    check_sha256(data, GLYPHS_SHA256, "jaxkfac/jobs/data/glyphs.npz")
    return Splits(*(_split(arrays, name) for name in _SPLIT_NAMES))


def _split(arrays: dict[str, np.ndarray], split: str) -> ClassImages:
    pixels, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    pixels = (pixels * (255 // _LEVELS))[..., None]
    names = bytes(arrays[f"{split}_names"]).decode("ascii")
    return ClassImages(
        f"glyphs ({split})", {name: pixels[labels == i] for i, name in enumerate(names)}
    )


# ---------------- episodes: a few images of a few classes to learn from, and queries to classify


class Episode(NamedTuple):
    """Some episodes, on the host or on a device.

    Attributes:
        support: ``(episodes, n_way, k_shot, height, width, channels)``, in [-1, 1].
        query: ``(episodes, queries, height, width, channels)``, in [-1, 1]; class by class, with
            ``queries = n_way * n_query``.
        targets: ``(episodes, queries)``, the index of the class in ``n_way``.
    """

    support: Float[np.ndarray | Array, "episodes n_way k_shot height width channels"]
    query: Float[np.ndarray | Array, "episodes queries height width channels"]
    targets: Int[np.ndarray | Array, "episodes queries"]


@dataclasses.dataclass(frozen=True)
class Episodes:
    """An endless sequence of episodes, each a pure function of the seed and its number.

    So a run can resume from a number alone, and ``n`` micro-batches of one episode are the
    episodes of a batch of ``n``.

    Attributes:
        classes: The images to sample from.
        n_way: Number of classes per episode.
        k_shot: Number of support images per class.
        n_query: Number of query images per class.
        seed: Seed of the episodes.

    Raises:
        ValueError: there are fewer classes than ``n_way``, or a class has fewer than
            ``k_shot + n_query`` images; names it and their number.

    Example:
        >>> from jaxkfac.jobs.data.few_shot import load_glyphs
        >>> episodes = Episodes(load_glyphs().novel, n_way=5, k_shot=1, n_query=3)
        >>> support, query, targets = episodes.at(0)
        >>> support.shape, query.shape, targets.shape
        ((1, 5, 1, 28, 28, 1), (1, 15, 28, 28, 1), (1, 15))
    """

    classes: ClassImages
    n_way: int = 5
    k_shot: int = 5
    n_query: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one(n_way=self.n_way, k_shot=self.k_shot, n_query=self.n_query)
        source, images = self.classes
        if len(images) < self.n_way:
            raise ValueError(f"n_way={self.n_way}: {source} has {len(images)} classes")
        needed = self.k_shot + self.n_query
        few = {
            name: len(class_images)
            for name, class_images in images.items()
            if len(class_images) < needed
        }
        if few:
            examples = ", ".join(
                f"{name!r} has {number}" for name, number in sorted(few.items())[:5]
            )
            more = f" and {len(few) - 5} more classes" if len(few) > 5 else ""
            raise ValueError(
                f"{source}: the class {examples}{more}, but an episode needs {needed} images of "
                f"each ({self.k_shot} to learn from and {self.n_query} to ask about); lower "
                "n_query or k_shot, or leave the class out"
            )

    def at(self, number: int, count: int = 1) -> Episode:
        """Episodes ``number`` to ``number + count - 1``, along the first axis of each array."""
        at_least_one(count=count)
        if number < 0:
            raise ValueError(f"number={number}: expected at least 0")
        drawn = [self._draw(number + i) for i in range(count)]
        support, query = (np.stack(part) for part in zip(*drawn, strict=True))
        targets = np.repeat(np.arange(self.n_way, dtype=np.int32), self.n_query)
        return Episode(support, query, np.tile(targets, (count, 1)))

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        names = sorted(self.classes.images)
        rows = []
        for i in rng.permutation(len(names))[: self.n_way]:
            images = self.classes.images[names[i]]
            rows.append(images[rng.permutation(len(images))[: self.k_shot + self.n_query]])
        pixels = np.stack(rows).astype(np.float32) / np.float32(127.5) - np.float32(1)
        support, query = np.split(pixels, [self.k_shot], axis=1)
        return support, query.reshape(-1, *query.shape[2:])
