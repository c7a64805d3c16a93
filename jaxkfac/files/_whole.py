"""Files that are written whole or not at all, and JSON sealed by a checksum."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxkfac._errors import DamagedFileError
from jaxkfac.memory import bytes_text

# ---------------- one way to write a file: whole, or not at all


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNCHANGED = "an older file of that name is as it was"
PARTIAL = ".partial"  # how a file ends that is being written, or whose writer was killed


@contextlib.contextmanager
def whole_file(
    path: Path, what: str, *, nbytes: int | None = None, remains: str = _UNCHANGED
) -> Iterator[BinaryIO]:
    """Write under another name, then rename: a reader sees the older file or the new one.

    The file has the mode that ``open`` would have given it: the umask counts.

    Args:
        path: Where the file shall be; its folder is there.
        what: What is written, for errors.
        nbytes: How many bytes, where that is known.
        remains: What still holds after an error.

    Raises:
        OSError: of the kind that the system raised, saying what could not be written, why, how
            much room was needed and what remains.

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


def write_text(path: Path, text: str, what: str, **words: Any) -> None:
    """Write ``text`` in UTF-8, whole or not at all; arguments as of :func:`whole_file`."""
    data = text.encode()
    with whole_file(path, what, nbytes=len(data), **words) as file:
        file.write(data)


def write_together(contents: Mapping[Path, bytes], what: str) -> None:
    """Write files of one folder that belong together: none is renamed before all are on the disk.

    Args:
        contents: Of each; they are renamed in this order.
        what: What is written, for errors.

    Raises:
        OSError: as of :func:`whole_file`.
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
    """Find out whether files can be written to a folder, which is made for it and taken away.

    Raises:
        OSError: they cannot; the folder and the reason are said.
    """
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = _beside(folder / "probe")
            try:
                with probe.open("xb") as file:
                    file.write(bytes(1 << 12))  # a name alone takes no room on a full disk
                    _to_disk(file)
            finally:
                probe.unlink(missing_ok=True)
        finally:
            for path in absent:
                with contextlib.suppress(OSError):  # it was not made, or others write there now
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
    # OSError itself picks the class of the errno: FileNotFoundError, PermissionError.
    return OSError(error.errno, f"{what} could not be saved to {path} ({reason}); {remains}")


# ---------------- jSON that holds the checksum of its own text


_FORM, _CRC = "format", "crc32"
ZEROS = "0" * 8  # in place of a checksum that is not taken yet


def checksum(data: bytes) -> str:
    """CRC-32 in hexadecimal digits: it sees every error of up to 32 bits in a row."""
    return f"{zlib.crc32(data):08x}"


def sealed(text: str, name: str) -> str:
    """The text of a JSON object whose value of ``name`` is its checksum.

    Args:
        text: With :data:`ZEROS` as that value, of which the checksum is taken.
        name: The key.
    """
    return _with(text, name, ZEROS, checksum(text.encode()))


def is_sealed(text: str, name: str, said: object) -> bool:
    """Whether ``said``, the value of ``name``, is the checksum of the text."""
    return checksum(_with(text, name, str(said), ZEROS).encode()) == said


def _with(text: str, name: str, old: str, new: str) -> str:
    return text.replace(f'"{name}": "{old}"', f'"{name}": "{new}"')


def write_json(path: Path, form: str, plain: Mapping[str, Any], what: str, **words: Any) -> None:
    """Write plain values with a checksum of every byte, whole or not at all.

    Args:
        path: Where the file shall be.
        form: What kind of file it is, for :func:`read_json`.
        plain: Values that survive JSON.
        what: What is written, for errors.
        words: As of :func:`whole_file`.

    Raises:
        OSError: as of :func:`whole_file`.
    """
    text = json.dumps({_FORM: form, **plain, _CRC: ZEROS}, indent=1)
    write_text(path, sealed(text, _CRC), what, **words)


def read_json(path: Path, form: str, remedy: str) -> dict[str, Any]:
    """The values of a file of :func:`write_json`.

    Args:
        path: The file.
        form: What kind of file is expected.
        remedy: What to do about a damaged one, for the error.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: a byte of it is not what was written.
    """
    try:
        text = path.read_bytes().decode()  # read_text would take one end of a line for another
        plain = dict(json.loads(text))
        said = plain.pop(_CRC, None)
        if not is_sealed(text, _CRC, said):
            raise ValueError(f"its checksum is not {said!r}")
        if (found := plain.pop(_FORM)) != form:
            raise ValueError(f"it is {found!r}, expected {form!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedFileError(f"{path} is damaged ({error}): {remedy}") from error
    return plain
