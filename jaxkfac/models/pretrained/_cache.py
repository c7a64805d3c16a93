"""Where downloaded weights are kept, and whether they are whole."""

import hashlib
import os
from pathlib import Path

from jaxkfac.models.pretrained._known import Known


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """``cache_dir``, else ``$JAXKFAC_CACHE``, else ``~/.cache/jaxkfac``.

    Example:
        >>> cache_folder("weights").name
        'weights'
    """
    chosen = cache_dir or os.environ.get("JAXKFAC_CACHE") or "~/.cache/jaxkfac"
    return Path(chosen).expanduser()


def cached_file(known: Known, cache_dir: str | Path | None = None) -> Path:
    """Where the file is, or would be."""
    return cache_folder(cache_dir) / known.name / Path(known.member).name


def check_digest(file: Path, sha256: str, what_to_do: str) -> None:
    """Read a file and compare its digest.

    Raises:
        ValueError: it differs, with both digests.
    """
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file} has sha256 {found}, expected {sha256}: {what_to_do}")
