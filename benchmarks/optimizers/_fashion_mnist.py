"""Fashion-MNIST from Debian's package, downloaded once and checked."""

import gzip
import hashlib
import os
import subprocess
from pathlib import Path

import numpy as np

PACKAGE = "dataset-fashion-mnist"
SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
_FILES = "usr/share/datasets/fashion-mnist/train-{}-ubyte.gz"


def fashion_mnist(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first training images, ``(count, 28, 28)`` in [0, 1], and their classes.

    It needs ``apt-get`` and ``dpkg``; 31 MB, kept in ``~/.cache/jaxkfac`` or ``$XDG_CACHE_HOME``.

    Raises:
        ValueError: the package is not the one whose digest stands here.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "jaxkfac", PACKAGE)
    if not (cache / _FILES.format("images-idx3")).exists():
        _download(cache)
    images, labels = (
        gzip.decompress((cache / _FILES.format(name)).read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    pixels = np.frombuffer(images, np.uint8, count * 784, offset=16)
    classes = np.frombuffer(labels, np.uint8, count, offset=8)
    return pixels.reshape(count, 28, 28).astype(np.float32) / 255, classes.astype(np.int32)


def _download(cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", PACKAGE], cwd=cache, check=True)
    (package,) = cache.glob("*.deb")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != SHA256:
        package.unlink()
        raise ValueError(f"{PACKAGE} has the sha256 {digest}, expected {SHA256}")
    subprocess.run(["dpkg", "-x", package.name, "."], cwd=cache, check=True)
    package.unlink()
