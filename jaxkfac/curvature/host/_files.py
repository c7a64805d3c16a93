"""A saved service as one file: arrays and a manifest, whole or not there at all."""

import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_FORMAT, _VERSION = "jaxkfac.HostCurvature", 1
_MANIFEST = "manifest.json"


def write(path: Path, about: dict[str, Any], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write ``arrays`` one by one and ``about`` beside them, under a name of its own first.

    The file is a ``.npz`` that NumPy reads too (bfloat16 as its bits), with a manifest that
    holds the shape, dtype and CRC-32 of every array.

    Raises:
        OSError: the disk is full or the folder cannot be written to; an older file of this
            name is as it was.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write_zip(file, about, arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            error.errno,
            f"the service could not be saved to {path} ({reason}); an older file is as it was",
        ) from error


def _write_zip(file: Any, about: dict[str, Any], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    contents = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            array = np.ascontiguousarray(array).reshape(array.shape)
            plain = array.view(np.uint16) if array.dtype == jnp.bfloat16 else array
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)
            contents[name] = {"dtype": array.dtype.name, "shape": array.shape, "crc": _crc(plain)}
        manifest = {"format": _FORMAT, "version": _VERSION, "arrays": contents, **about}
        archive.writestr(_MANIFEST, json.dumps(manifest))


class Saved:
    """A saved service that is open for reading.

    Args:
        path: The file.

    Attributes:
        about: What was given to :func:`write`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, damaged, or was not written by :func:`write`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            raise FileNotFoundError(f"no saved service at {path}")
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(
                f"{path} is no saved service, or only a part of one ({error})"
            ) from error
        try:
            self.about: dict[str, Any] = json.loads(self._archive.read(_MANIFEST))
            written = self.about.get("format"), self.about.get("version")
        except Exception as error:
            self._archive.close()
            raise ValueError(f"{path} has no readable {_MANIFEST}: no saved service") from error
        if written != (_FORMAT, _VERSION):
            self._archive.close()
            raise ValueError(f"{path} is {written}, expected {(_FORMAT, _VERSION)}")

    def __enter__(self) -> "Saved":
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, name: str) -> np.ndarray:
        """One array, its checksum compared.

        Raises:
            ValueError: it is absent or damaged.
        """
        try:
            expected = self.about["arrays"][name]
            with self._archive.open(f"{name}.npy") as member:
                plain = np.lib.format.read_array(member, allow_pickle=False)
            array = plain.view(jnp.bfloat16) if expected["dtype"] == "bfloat16" else plain
            found = {"dtype": array.dtype.name, "shape": list(array.shape), "crc": _crc(plain)}
            if found != expected:
                raise ValueError(f"it is {found}, the manifest says {expected}")
        except Exception as error:  # a damaged file fails in many ways
            raise ValueError(f"{self._path}: the array {name!r} is damaged: {error}") from error
        return array


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)
