"""Images from a folder for each class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxkfac._errors import at_least_one, one_of
from jaxkfac.data.few_shot._class_images import ClassImages, Splits, split_classes

_ENDINGS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)
_LONGEST = 256  # the longer side over the shorter
_SPLITS = (("train",), ("validation", "val", "valid", "dev"), ("novel", "test"))


def read_class_folder(
    folder: Path | str, *, image_size: int = 84, channels: Literal[1, 3] = 3
) -> ClassImages:
    """Read a folder of folders, each with the images of one class.

    An image is scaled until it covers the square, and its middle is cut out. Files and folders
    whose names begin with a dot are passed over, and files that end like no image.

    Args:
        folder: ``folder/class/image``; the class is the inner folder's name.
        image_size: Height and width to come, pixels.
        channels: 1 for gray, 3 for colours.

    Returns:
        All images, ``image_size**2 * channels`` bytes each, in the order of their names.

    Raises:
        FileNotFoundError: there is no such folder, or no class in it, or no image in a class.
        ValueError: a file does not decode; it is named.
        ModuleNotFoundError: Pillow is not installed.

    Memory:
        All of it: 60,000 images of 84 x 84 in colour are 1.3 GB.
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
        held = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{folder} has no folder for a class; it holds {held}. Expected {folder}/CLASS/IMAGE"
        )
    return ClassImages(str(folder), images)


def read_splits(
    folder: Path | str, *, image_size: int = 84, channels: Literal[1, 3] = 3, seed: int = 0
) -> Splits:
    """Read ``folder/train``, ``validation`` and ``novel``, or divide one folder.

    Args:
        folder: Of three folders of these names (``val``, ``valid``, ``dev`` and ``test`` are
            read too), each as :func:`read_class_folder` takes it; or one such folder, whose
            classes are divided at random (:func:`split_classes`).
        image_size: As of :func:`read_class_folder`.
        channels: Likewise.
        seed: Of the division.

    Raises:
        ValueError: one of the three is missing, or a class is in two of them; or as of
            :func:`read_class_folder`.
    """
    folder = _existing(Path(folder))
    options: dict[str, Any] = {"image_size": image_size, "channels": channels}
    found = [[folder / name for name in names if (folder / name).is_dir()] for names in _SPLITS]
    if not any(found):
        return split_classes(read_class_folder(folder, **options), seed=seed)
    if not all(len(folders) == 1 for folders in found):
        wanted = "; ".join(" or ".join(names) for names in _SPLITS)
        raise ValueError(
            f"{folder} has some folders of splits: expected one of each, {wanted}, or folders of "
            "classes alone"
        )
    splits = Splits(*(read_class_folder(one, **options) for (one,) in found))
    for i, one in enumerate(splits):
        for other in splits[i + 1 :]:
            if both := sorted(one.images.keys() & other.images.keys()):
                raise ValueError(f"the class {both[0]!r} is in {one.source} and in {other.source}")
    return splits


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "reading image files needs Pillow: pip install 'jaxkfac[images]'", name="PIL"
        ) from error
    return Image


def _decoded(decoder: Any, path: Path, size: int, channels: int) -> np.ndarray:
    try:
        with decoder.open(path) as file:
            width, height = file.size
            if max(width, height) > _LONGEST * min(width, height):  # a square of it would be huge
                raise ValueError(f"it has {width} x {height} pixels")
            image = _eight_bits(file).convert("L" if channels == 1 else "RGB")
    except Exception as error:  # a decoder of a hundred formats raises what it likes
        (what, *_) = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path} does not decode as an image ({what})") from error
    scale = size / min(image.size)
    width, height = (max(size, round(scale * side)) for side in image.size)
    image = image.resize((width, height), decoder.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.crop((left, top, left + size, top + size))
    return np.asarray(image).reshape(size, size, channels)


def _eight_bits(file: Any) -> Any:
    """An image as it is seen: upright, on white where it is transparent, eight bits a channel."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, np.float64)
        whole = 65535 if image.mode != "F" else 1 if values.max(initial=0) <= 1 else 255
        return Image.fromarray(np.clip(255 / whole * values, 0, 255).round().astype(np.uint8))
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
