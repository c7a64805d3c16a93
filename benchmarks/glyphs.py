"""Draw the glyphs that jaxkfac embeds, from the font packages of Debian 12.

Run, in a folder of its own:
    apt-get download $(python -m benchmarks.glyphs --packages)
    for file in *.deb; do dpkg -x "$file" fonts; done
    python -m benchmarks.glyphs fonts

It writes jaxkfac/jobs/data/glyphs.npz. The versions of Pillow and of the packages decide single
pixels; those in use are in jaxkfac/jobs/data/glyphs.txt.
"""

import argparse
import math
import os
import string
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, FINER = 28, 4  # pixels of an image, and of the drawing for each of them
LEVELS = 15  # of gray beside black
TARGET = Path(__file__).parent.parent / "jaxkfac" / "jobs" / "data" / "glyphs.npz"

# (package, faces), a family each. Families that were made from one another stay together: Roboto
# and Roboto Slab.
FACES = {
    "train": (
        ("fonts-dejavu-core", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf"),
        ("fonts-liberation2", "LiberationSerif-Regular.ttf", "LiberationSerif-BoldItalic.ttf"),
        ("fonts-open-sans", "OpenSans-Light.ttf", "OpenSans-BoldItalic.ttf"),
        ("fonts-roboto-unhinted", "Roboto-Regular.ttf", "Roboto-BlackItalic.ttf"),
        ("fonts-roboto-slab", "RobotoSlab-Regular.otf", "RobotoSlab-Bold.otf"),
        ("fonts-lato", "Lato-Regular.ttf", "Lato-HeavyItalic.ttf"),
        ("fonts-ebgaramond", "EBGaramond12-Regular.otf", "EBGaramond12-Italic.otf"),
        ("fonts-comfortaa", "Comfortaa-Regular.ttf", "Comfortaa-Bold.ttf"),
        ("fonts-quicksand", "Quicksand-Light.ttf", "Quicksand-Bold.ttf"),
        ("fonts-linuxlibertine", "LinLibertine_R.otf", "LinBiolinum_RI.otf"),
        ("fonts-lobstertwo", "LobsterTwo-Regular.otf", "LobsterTwo-Bold.otf"),
        ("fonts-vollkorn", "Vollkorn-Regular.ttf", "Vollkorn-BlackItalic.ttf"),
        ("fonts-courier-prime", "Courier Prime.otf", "Courier Prime Bold.otf"),
        ("fonts-yanone-kaffeesatz", "YanoneKaffeesatz-Light.otf", "YanoneKaffeesatz-Bold.otf"),
        ("fonts-dosis", "Dosis-Medium.otf", "Dosis-ExtraBold.otf"),
        ("fonts-sil-andika", "Andika-Regular.ttf", "Andika-BoldItalic.ttf"),
    ),
    "validation": (
        ("fonts-jura", "Jura-Regular.otf", "Jura-Bold.otf"),
        ("fonts-sil-gentium-basic", "GenBasR.ttf", "GenBasBI.ttf"),
        ("fonts-cabin", "Cabin-Regular.otf", "Cabin-BoldItalic.otf"),
        ("fonts-junicode", "JunicodeTwoBeta-Regular.otf", "JunicodeTwoBeta-Bold.otf"),
        ("fonts-firacode", "FiraCode-Regular.ttf", "FiraCode-Bold.ttf"),
        ("fonts-oldstandard", "OldStandard-Regular.ttf", "OldStandard-Italic.ttf"),
    ),
    "novel": (
        ("fonts-mononoki", "mononoki-Regular.ttf", "mononoki-Bold-Italic.ttf"),
        ("fonts-crosextra-caladea", "Caladea-Regular.ttf", "Caladea-BoldItalic.ttf"),
        ("fonts-cantarell", "Cantarell-Light.otf", "Cantarell-ExtraBold.otf"),
        ("fonts-jetbrains-mono", "JetBrainsMono-Regular.ttf", "JetBrainsMono-ExtraBoldItalic.ttf"),
        ("fonts-play", "Play-Regular.ttf", "Play-Bold.ttf"),
        ("fonts-karla", "Karla-Regular.otf", "Karla-BoldItalic.otf"),
        ("fonts-dancingscript", "DancingScript-Regular.otf", "DancingScript-Bold.otf"),
        ("fonts-sil-charis", "CharisSIL-Regular.ttf", "CharisSIL-BoldItalic.ttf"),
        ("fonts-go", "Go-Regular.ttf", "Go-Bold-Italic.ttf"),
        ("fonts-league-spartan", "LeagueSpartan-Regular.otf", "LeagueSpartan-ExtraBold.otf"),
    ),
}
DRAWINGS = {"train": 4, "validation": 3, "novel": 2}  # of each character in each face

# Characters that look alike in some face are one group, and stay in one split.
GROUPS = "0Oo 1Iil 2Zz 5Ss 6b 9gq 8B Cc Jj Kk Mm Nn Pp Uu Vv Ww Xx Yy".split()
SIZES = {"validation": 10, "novel": 14}  # classes; the rest is for training


def class_splits() -> dict[str, list[str]]:
    """The characters of each split, drawn by groups."""
    single = set(string.digits + string.ascii_letters) - set("".join(GROUPS))
    groups = [*GROUPS, *sorted(single)]
    order = [groups[i] for i in np.random.Generator(np.random.Philox(0)).permutation(len(groups))]
    found: dict[str, list[str]] = {"train": [], "validation": [], "novel": []}
    for group in order:
        fits = (s for s, size in SIZES.items() if len(found[s]) + len(group) <= size)
        found[next(fits, "train")].extend(group)
    return {split: sorted(names) for split, names in found.items()}


def draw(character: str, face: Path, seed: list[int]) -> np.ndarray:
    """One distorted character, white on black, ``(SIDE, SIDE)`` in ``0 .. LEVELS``."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    angle, shear = math.radians(rng.uniform(-12, 12)), rng.uniform(-0.2, 0.2)
    scale, ink = rng.uniform(0.85, 1.15), rng.uniform(0.7, 1.0)
    shift_x, shift_y = rng.uniform(-2, 2, size=2) * FINER
    size = SIDE * FINER
    font = ImageFont.truetype(str(face), 20 * FINER, layout_engine=ImageFont.Layout.BASIC)
    canvas = Image.new("L", (size, size))
    at = (size / 2, 19 * FINER)  # the middle of the baseline: small and capital letters differ
    ImageDraw.Draw(canvas).text(at, character, fill=255, font=font, anchor="ms")
    # Pillow's matrix leads from the pixel that is drawn back to the one that is read.
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    a, b, d, e = cos, sin + shear * cos, -sin, cos - shear * sin
    x, y = size / 2 + shift_x, size / 2 + shift_y
    matrix = (a, b, size / 2 - a * x - b * y, d, e, size / 2 - d * x - e * y)
    canvas = canvas.transform(
        (size, size), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC
    )
    small = np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.BOX), np.float64)
    return np.rint(ink * small / 255 * LEVELS).astype(np.uint8)


def draw_all(fonts: Path) -> dict[str, np.ndarray]:
    """What the archive holds: images, and the class and face of each, by split."""
    found: dict[str, np.ndarray] = {}
    files = {name: Path(folder) / name for folder, _, names in os.walk(fonts) for name in names}
    for split, names in class_splits().items():
        for package, *faces in FACES[split]:
            for face in faces:
                if face not in files:
                    raise SystemExit(f"{face} is not below {fonts}: unpack {package} there")
        paths = [files[face] for _, *faces in FACES[split] for face in faces]
        images = [
            (draw(name, path, [ord(name), i, n]), label, i)
            for label, name in enumerate(names)
            for i, path in enumerate(paths)
            for n in range(DRAWINGS[split])
        ]
        pixels, labels, faces = zip(*images)
        found[f"{split}_images"] = np.stack(pixels)
        found[f"{split}_labels"] = np.asarray(labels, np.uint8)
        found[f"{split}_faces"] = np.asarray(faces, np.uint8)
        found[f"{split}_names"] = np.frombuffer("".join(names).encode(), np.uint8)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fonts", nargs="?", type=Path, help="folder with the unpacked packages")
    parser.add_argument("--packages", action="store_true", help="print their names and stop")
    arguments = parser.parse_args()
    if arguments.packages or arguments.fonts is None:
        print(" ".join(package for faces in FACES.values() for package, *_ in faces))
        return
    arrays = draw_all(arguments.fonts)
    np.savez_compressed(TARGET, **arrays)
    for split in FACES:
        labels, name = arrays[f"{split}_labels"], bytes(arrays[f"{split}_names"]).decode()
        print(f"{split}: {len(name)} classes ({name}) of {len(labels) // len(name)} images")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
