"""Files that are written atomically, and JSON files with a checksum."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxkfac._errors import DamagedFileError
from jaxkfac.memory import bytes_text

# ---------------- atomic writing


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNCHANGED = "an older file of that name is as it was"
PARTIAL = ".partial"  # suffix of files that are being written, or whose writer was killed


@contextlib.contextmanager
def whole_file(
    path: Path, what: str, *, nbytes: int | None = None, remains: str = _UNCHANGED
) -> Iterator[BinaryIO]:
    """Write under another name, then rename: readers see either the old file or the new one.

    The file gets the mode that ``open`` would have given it, following the umask. A symbolic link
    of that name is replaced, not followed.

    Args:
        path: Path of the file, in an existing folder.
        what: Name of the content, for errors.
        nbytes: Number of bytes, if known.
        remains: What still holds after an error, for the message.

    Raises:
        OSError: of the system's class, with a message that says what could not be written, why,
            how much room was needed and what remains.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(pathlib.Path(folder) / "x", "an example") as file:
        ...         _ = file.write(b"whole")
        ...     (pathlib.Path(folder) / "x").read_bytes()
        b'whole'
    """
    partial = _beside(path)
    try:
        try:
            with partial.open("xb") as file:
                yield file
                _to_disk(file)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _explained(error, path, what, nbytes, remains) from error


def write_text(path: Path, text: str, what: str, **options: Any) -> None:
    """Write ``text`` in UTF-8 atomically; arguments as for :func:`whole_file`."""
    data = text.encode()
    with whole_file(path, what, nbytes=len(data), **options) as file:
        file.write(data)


def write_together(contents: Mapping[Path, bytes], what: str) -> None:
    """Write files of one folder that belong together: all are on disk before any is renamed.

    Args:
        contents: Content of each file; they are renamed in this order.
        what: Name of the content, for errors.

    Raises:
        OSError: as for :func:`whole_file`.
    """
    nbytes = sum(map(len, contents.values()))
    partials = {path: _beside(path) for path in contents}
    path, remains = next(iter(contents)), "older files of that folder are as they were"
    try:
        try:
            for path, partial in partials.items():
                with partial.open("xb") as file:
                    file.write(contents[path])
                    _to_disk(file)
            for path, partial in partials.items():
                os.replace(partial, path)
                remains = f"{path.name} is new already: save once more"
        except BaseException:
            for partial in partials.values():
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _explained(error, path, what, nbytes, remains) from error


def probe_folder(folder: Path) -> None:
    """Test whether files can be written to a folder, creating and removing it if missing.

    Raises:
        OSError: they cannot; the message says the folder and the reason.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = _beside(folder / "probe")
            try:
                with probe.open("xb") as file:
                    file.write(bytes(1 << 12))  # an empty file would fit on a full disk
                    _to_disk(file)
            finally:
                probe.unlink(missing_ok=True)
        finally:
            for path in absent:
                with contextlib.suppress(OSError):  # it was not created, or others write there now
                    path.rmdir()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            error.errno,
            f"no file can be written to {folder} ({reason}): nothing has been begun; make room "
            "there, or choose another folder",
        ) from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _explained(error: OSError, path: Path, what: str, nbytes: int | None, remains: str) -> OSError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        needed = "" if nbytes is None else f"it needs {bytes_text(nbytes)}, and "
        free = bytes_text(shutil.disk_usage(path.parent).free)
        reason += f": {needed}{path.parent} has {free} free"
    # OSError itself picks the subclass for the errno: FileNotFoundError, PermissionError.
    return OSError(error.errno, f"{what} could not be saved to {path} ({reason}); {remains}")


# ---------------- JSON that holds the checksum of its own text


_FORM, _CRC = "format", "crc32"
ZEROS = "0" * 8  # placeholder while the checksum is computed


def checksum(data: bytes) -> str:
    """CRC-32 in hexadecimal digits; it detects every burst error of up to 32 bits."""
    return checksum_of([data])


def checksum_of(parts: Iterable[bytes | memoryview]) -> str:
    """:func:`checksum` of buffers one after another, without a copy of them all."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def check_sha256(data: bytes, sha256: str, file: str) -> None:
    """Compare the SHA-256 of data that the package contains.

    Args:
        data: The file, or what it unpacks to.
        sha256: The expected digest.
        file: Path of the file inside the package, for the error.

    Raises:
        ValueError: it differs; names both digests.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{file} is damaged: sha256 {digest}, expected {sha256}; reinstall jaxkfac"
        )


def sealed(text: str, name: str) -> str:
    """Insert the checksum of a JSON object's text as the value of ``name``.

    Args:
        text: The text with :data:`ZEROS` as that value; the checksum is computed from this text.
        name: The key.
    """
    return _with(text, name, ZEROS, checksum(text.encode()))


def is_sealed(text: str, name: str, stored: object) -> bool:
    """Whether ``stored``, the value of ``name``, is the checksum of the text."""
    return checksum(_with(text, name, str(stored), ZEROS).encode()) == stored


def _with(text: str, name: str, old: str, new: str) -> str:
    return text.replace(f'"{name}": "{old}"', f'"{name}": "{new}"')


def write_json(path: Path, form: str, plain: Mapping[str, Any], what: str, **options: Any) -> None:
    """Write plain values atomically, with a checksum over every byte.

    Args:
        path: Path of the file.
        form: Kind of file, checked by :func:`read_json`.
        plain: Values that survive JSON.
        what: Name of the content, for errors.
        options: Further arguments of :func:`whole_file`.

    Raises:
        OSError: as for :func:`whole_file`.
    """
    text = json.dumps({_FORM: form, **plain, _CRC: ZEROS}, indent=1)
    write_text(path, sealed(text, _CRC), what, **options)


def read_json(path: Path, form: str, remedy: str) -> dict[str, Any]:
    """Read a file of :func:`write_json`.

    Args:
        path: The file.
        form: Expected kind of file.
        remedy: What to do about a damaged file, for the error.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: the file is damaged, or of another kind.
    """
    try:
        text = path.read_bytes().decode()  # read_text would normalize line ends
        plain = dict(json.loads(text))
        stored = plain.pop(_CRC, None)
        if not is_sealed(text, _CRC, stored):
            raise ValueError(f"its checksum is not {stored!r}")
        if (actual_form := plain.pop(_FORM)) != form:
            raise ValueError(f"it is {actual_form!r}, expected {form!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): {remedy}") from error
    return plain
