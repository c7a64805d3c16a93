"""Named arrays and plain values in one file, with every byte covered by a checksum."""

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

from jaxkfac._errors import DamagedFileError
from jaxkfac.files._whole import whole_file

_VERSION = 2
_MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_SEAL = "crc32 {:08x}"  # comment of the zip file: the checksum of all bytes before it


def write_archive(
    path: Path,
    form: str,
    about: dict[str, Any],
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    what: str,
    **options: Any,
) -> None:
    """Write ``arrays`` one by one and ``about`` beside them, atomically.

    The file is an ``.npz`` that NumPy can read (bfloat16 as its bits), with a manifest that
    holds the shape, dtype and CRC-32 of every array, and with the CRC-32 of the file as its
    comment. Checksums are computed while writing, at about 0.6 s of CPU time a GiB.

    Args:
        path: Path of the file.
        form: Kind of file, checked by :class:`Archive`.
        about: Plain values that survive JSON.
        arrays: ``(name, array)``, consumed one after the other.
        what: Name of the content, for errors.
        options: Further arguments of :func:`whole_file`.

    Raises:
        OSError: as for :func:`whole_file`.
        TypeError: an array holds something other than numbers and booleans.
    """
    with whole_file(path, what, **options) as file:
        summed: Any = _Summed(file)
        blank = _SEAL.format(0).encode()
        with zipfile.ZipFile(summed, "w", zipfile.ZIP_STORED) as archive:
            archive.comment = blank
            contents = {name: _write_array(archive, name, array) for name, array in arrays}
            manifest = {"format": form, "version": _VERSION, "arrays": contents, **about}
            with archive.open(_MANIFEST, "w") as member:  # writestr would write the time of day
                member.write(json.dumps(manifest).encode())
        file.seek(-len(blank), 2)
        file.write(_SEAL.format(summed.before).encode())


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> dict[str, Any]:
    dtype = array.dtype.newbyteorder("=")  # the manifest does not state the order of bytes
    if not _has_name(dtype):
        raise TypeError(f"array {name!r}: expected numbers or booleans, got {dtype}")
    # The first call turns a scalar into (1,).
    array = np.ascontiguousarray(array, dtype).reshape(array.shape)
    plain = array.view(_plain(array.dtype))
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(
            member, np.lib.format.header_data_from_array_1_0(plain)
        )
        for chunk in _chunks(plain):
            member.write(chunk)
    crc = archive.getinfo(f"{name}.npy").CRC
    return {"dtype": array.dtype.name, "shape": array.shape, "crc": crc}


def _named(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _has_name(dtype: np.dtype) -> bool:
    """Whether the name of a dtype, which the manifest holds, gives the dtype again."""
    try:
        return not dtype.hasobject and _named(dtype.name) == dtype
    except TypeError:
        return False


def _plain(dtype: np.dtype) -> np.dtype:
    """The dtype, or that of its bits for dtypes that NumPy's format does not have."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of a contiguous array, without the copy that NumPy's reader and writer make."""
    view = array.reshape(-1).view(np.uint8).data
    return (view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK))


class _Summed:
    """Passes data on to a file and computes its CRC-32.

    It cannot seek, so a zip file is written from front to back.

    Attributes:
        before: Checksum of all bytes except those of the last write, which in a zip file are the
            comment.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.before = self._crc = 0

    def write(self, data: Any) -> int:
        self.before, self._crc = self._crc, zlib.crc32(data, self._crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class Archive:
    """A file of :func:`write_archive`, opened for reading and verified.

    Args:
        path: The file.
        form: Expected kind of file.
        what: Name of that kind, for errors.

    Attributes:
        about: Values given to :func:`write_archive`.
        names: Names of the arrays, in order.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: the file is damaged; names the damaged array, if it is in one.
        ValueError: it is another kind of file, or of another version.
    """

    def __init__(self, path: Path, form: str, what: str) -> None:
        self._path = path
        if not path.exists():
            raise FileNotFoundError(f"no {what} at {path}")
        if path.is_dir():
            raise DamagedFileError(f"{path} is no {what} but a folder")
        self._file = path.open("rb")
        try:
            self._archive = self._opened(what)
            self._check(form, what)
        except BaseException:
            self.close()
            raise

    def _opened(self, what: str) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self._file)
        except Exception as error:  # damage causes errors of many types
            raise DamagedFileError(
                f"{self._path} is no {what}, or only a part of one ({error})"
            ) from error

    def _check(self, form: str, what: str) -> None:
        try:
            self.about: dict[str, Any] = json.loads(self._archive.read(_MANIFEST))
            form_and_version = self.about["format"], self.about["version"]
        except Exception as error:
            raise DamagedFileError(
                f"{self._path} has no readable {_MANIFEST}: it is no {what}, or damaged"
            ) from error
        if form_and_version != (form, _VERSION):
            raise ValueError(f"{self._path} is {form_and_version}, expected {(form, _VERSION)}")
        self.names = list(self.about["arrays"])
        if self._archive.comment != self._seal():
            self._raise_damaged()

    def _seal(self) -> bytes:
        crc, remaining = 0, self._file.seek(0, 2) - len(_SEAL.format(0))
        self._file.seek(0)
        while chunk := self._file.read(min(remaining, _CHUNK)):
            crc, remaining = zlib.crc32(chunk, crc), remaining - len(chunk)
        return _SEAL.format(crc).encode()

    def _raise_damaged(self) -> NoReturn:
        for name in self.names:
            self.read(name)
        raise DamagedFileError(
            f"{self._path} is damaged: its arrays are intact, but its manifest is not"
        )

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, name: str) -> np.ndarray:
        """Read one array and compare its checksum.

        Raises:
            DamagedFileError: the array is missing or damaged.
        """
        try:
            expected = self.about["arrays"][name]
            with self._archive.open(f"{name}.npy") as member:  # checks the zip file's own CRC
                np.lib.format.read_magic(member)
                shape, _, stored = np.lib.format.read_array_header_1_0(member)
                dtype = _named(expected["dtype"])
                actual = {"shape": list(shape), "crc": self._archive.getinfo(f"{name}.npy").CRC}
                if stored != _plain(dtype) or actual["shape"] != expected["shape"]:
                    raise ValueError(
                        f"it is {stored}{actual['shape']}, the manifest says {expected}"
                    )
                array = np.empty(shape, dtype)
                for chunk in _chunks(array):
                    chunk[:] = member.read(len(chunk))
                if member.read(1):
                    raise ValueError("it is longer than the manifest says")
            if actual["crc"] != expected["crc"]:
                raise ValueError(f"its checksum is {actual['crc']}, the manifest says {expected}")
        except MemoryError:
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DamagedFileError(
                f"{self._path}: the array {name!r} is damaged: {reason}"
            ) from error
        return array
